#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include <fusedmoe/status.hpp>
#include <fusedmoe/weights.hpp>

#include "weights/fragment.hpp"

namespace fusedmoe {

/// How weights of a canonical format are held by the fragment layout.
struct FragmentSpec {
  FragmentFormat format = FragmentFormat::kBf16;
  std::optional<FragmentFormat> own_gate_up;  ///< of gate and up, where `format` is that of down alone
  DType half_scale = DType::kBF16;            ///< of FragmentScale::kHalf: BF16 or F16
  bool row_scale = false;                     ///< channel scales stand beside the blocks, F32 a row
  bool products = false;                      ///< codes times block scales (block_products.hpp)
  bool operator==(const FragmentSpec&) const = default;
  FragmentFormat gate_up_format() const { return own_gate_up.value_or(format); }
  /// That of gate and up alone.
  FragmentSpec OfGateUp() const;
  /// "fragment(nvfp4, 576 bytes a unit of 16 x 64)"; of two formats, gate and up first.
  std::string ToString() const;
};

/// The spec that holds such weights without loss, or why there is none. `has_zero_points`: stored ones.
/// Integer scales are held to 15 mantissa bits where a zero point stands beside them (16-bit scales exactly),
/// to 8 where an offset does (fragment_offsets.hpp).
Result<FragmentSpec> ChooseFragmentSpec(const WeightFormat& format, bool has_zero_points);

/// Why this matrix cannot be packed by the spec: a slice that starts inside a group.
Status CheckFragmentMatrix(const CanonicalMatrix& matrix, const FragmentSpec& spec);

/// Bytes and factors of one expert.
struct FragmentSizes {
  int64_t gate_up_bytes = 0;
  int64_t down_bytes = 0;
  int64_t gate_up_rows = 0;  ///< of row scales and biases, a part
  int64_t down_rows = 0;
  int parts = 1;
};
FragmentSizes FragmentSizesOf(const FragmentSpec& spec, int64_t hidden, int64_t intermediate, bool gated);

/// Where one expert goes. Row scales and biases may be null when the layer has none (codes of NaN need row
/// scales: FragmentStager); rows beyond the matrix get scale 0 and bias 0. Weights in activation order are
/// sorted by groups, and the input order says what the first GEMM then wants; the intermediate comes out in
/// the order of the second.
struct FragmentOutput {
  uint8_t* gate_up = nullptr;
  uint8_t* down = nullptr;
  float* gate_up_tensor_scale = nullptr;  ///< [parts]: tensor scale times the factor of the layout
  float* down_tensor_scale = nullptr;     ///< [1]
  float* gate_up_row_scale = nullptr;     ///< [parts][gate_up_rows]
  float* down_row_scale = nullptr;        ///< [down_rows]
  float* gate_up_bias = nullptr;
  float* down_bias = nullptr;
  int32_t* input_order = nullptr;  ///< [hidden]: the column of the input that stands at each k
};

/// Packs one expert. A pure function; scratch of a few rows. kUnsupported as CheckFragmentMatrix says.
Status PackFragmentExpert(const CanonicalExpert& expert, const FragmentSpec& spec, const FragmentOutput& out);

/// The inverse: codes and block scales (and zero points) of one expert back into matrices whose tensors are
/// allocated and whose shapes are set, in the order of the layout. Codes of NVFP4 blocks with scale zero come
/// back as zero. kUnsupported of products, which do not say what their factors were, and of offsets.
Status UnpackFragmentExpert(const FragmentSpec& spec, const FragmentOutput& packed, CanonicalExpert& expert);

/// What the kernels decode from a row block and the scales of its first unit (FragmentPlaces): the weight of
/// fragment row `row`, column k, without row and tensor scales (the tensor scale of FragmentOutput carries
/// the rest of the factor).
float FragmentValue(const FragmentSpec& spec, const uint8_t* block, const uint8_t* scales, int row,
                    int64_t k);

}  // namespace fusedmoe
