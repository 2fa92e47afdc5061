#include "jobs/convert/transform.hpp"

#include <algorithm>
#include <cmath>
#include <optional>

#include <fmt/format.h>

#include "numerics/rows.hpp"
#include "weights/dequantize.hpp"
#include "weights/quantize.hpp"

namespace fusedmoe::jobs {
namespace {

// Multiplies inputs by one power of two in the scales instead.
void FoldSmoothing(float factor, CanonicalMatrix& matrix) {
  matrix.pre_quant_scale = Tensor();
  if (matrix.tensor_scale) {
    *matrix.tensor_scale *= factor;
  }
  if (matrix.input_tensor_scale) {
    *matrix.input_tensor_scale /= factor;
  }
}

Result<CanonicalMatrix> Plain(const CanonicalMatrix& from, const Target& target) {
  CanonicalMatrix to;
  to.rows = from.rows;
  to.cols = from.cols;
  to.format = target.format;
  to.bias = from.bias;
  FMOE_ASSIGN_OR_RETURN(to.codes, Tensor::Allocate(target.format.element, {from.rows, from.cols}));
  const RowDecoder decoder(from);
  std::vector<float> row(static_cast<size_t>(from.cols));
  for (int64_t r = 0; r < from.rows; ++r) {
    decoder.Decode(r, 0, from.cols, row.data());
    Smooth(from, row.data());
    EncodeRow(target.format.element, row.data(), from.cols,
              to.codes.mutable_view().data() + r * to.codes.view().stride_bytes(0));
  }
  return to;
}

Result<std::vector<CanonicalMatrix>> Requantize(std::span<const CanonicalMatrix* const> matrices,
                                                const Target& target) {
  std::vector<Tensor> decoded;
  WeightQuantizerOptions quantizer;
  quantizer.recipe = target.recipe;
  float amax = 0;
  for (const CanonicalMatrix* matrix : matrices) {
    FMOE_ASSIGN_OR_RETURN(Tensor values, DequantizeMatrix(*matrix));
    for (int64_t row = 0; row < matrix->rows && !matrix->pre_quant_scale.empty(); ++row) {
      Smooth(*matrix, values.mutable_view().as<float>() + row * matrix->cols);
    }
    FMOE_ASSIGN_OR_RETURN(const float own, WeightAmax(values.view()));
    amax = std::max(amax, own);
    decoded.push_back(std::move(values));
  }
  if (target.format.has_tensor_scale) {
    quantizer.shared_amax = amax;
  }
  std::vector<CanonicalMatrix> result;
  for (size_t index = 0; index < matrices.size(); ++index) {
    FMOE_ASSIGN_OR_RETURN(CanonicalMatrix to,
                          QuantizeMatrix(decoded[index].view(), target.format, quantizer));
    to.bias = matrices[index]->bias;
    to.input_tensor_scale = matrices[index]->input_tensor_scale;
    FMOE_RETURN_IF_ERROR(Complete(target.storage, to));
    result.push_back(std::move(to));
  }
  return result;
}

// Folds smoothing into scales where it is one factor for all inputs of a matrix: into copies, which
// `matrices` then point to. Whether no matrix keeps its own.
bool FoldAll(std::vector<CanonicalMatrix>& folded, std::vector<const CanonicalMatrix*>& matrices) {
  bool all = true;
  for (size_t index = 0; index < matrices.size(); ++index) {
    const CanonicalMatrix& given = *matrices[index];
    const std::optional<float> factor = UniformSmoothing(given);
    // Without a tensor scale only the factor 1 goes anywhere.
    const bool folds = factor && (*factor == 1.0F || given.tensor_scale);
    all &= folds;
    if (folds && !given.pre_quant_scale.empty()) {
      folded[index] = given;
      FoldSmoothing(*factor, folded[index]);
      matrices[index] = &folded[index];
    }
  }
  return all;
}

// All of them with their codes in `result`, or why one cannot keep them.
Result<std::string> TryKeepCodes(std::span<const CanonicalMatrix* const> matrices, const Target& target,
                                 std::vector<CanonicalMatrix>& result) {
  for (const CanonicalMatrix* matrix : matrices) {
    if (std::string why = WhyNotKept(*matrix, target); !why.empty()) {
      return why;
    }
    FMOE_ASSIGN_OR_RETURN(CanonicalMatrix to, KeepCodes(*matrix, target));
    if (to.empty()) {
      return std::string("the target's type of scales does not hold those that are there");
    }
    result.push_back(std::move(to));
  }
  return std::string();
}

}  // namespace

void Smooth(const CanonicalMatrix& matrix, float* row) {
  if (!matrix.pre_quant_scale.empty()) {
    const auto* factors = matrix.pre_quant_scale.view().as<float>();
    for (int64_t col = 0; col < matrix.cols; ++col) {
      row[col] *= factors[col];
    }
  }
}

std::optional<float> UniformSmoothing(const CanonicalMatrix& matrix) {
  if (matrix.pre_quant_scale.empty()) {
    return 1.0F;
  }
  const auto* factors = matrix.pre_quant_scale.view().as<float>();
  int exponent = 0;
  const bool uniform =
      std::all_of(factors, factors + matrix.cols, [&](float factor) { return factor == factors[0]; }) &&
      std::frexp(factors[0], &exponent) == 0.5F;
  return uniform ? std::optional(factors[0]) : std::nullopt;
}

Result<std::vector<CanonicalMatrix>> Transform(std::span<const CanonicalMatrix* const> given,
                                               const Target& target) {
  std::vector<CanonicalMatrix> result;
  if (!target.format.quantized()) {
    for (const CanonicalMatrix* matrix : given) {
      FMOE_ASSIGN_OR_RETURN(CanonicalMatrix to, Plain(*matrix, target));
      result.push_back(std::move(to));
    }
    return result;
  }
  std::vector<CanonicalMatrix> folded(given.size());
  std::vector<const CanonicalMatrix*> matrices(given.begin(), given.end());
  const bool smoothed = !target.storage.smoothing && !FoldAll(folded, matrices);
  const WeightFormat& format = matrices.front()->format;
  std::string why = smoothed ? "its inputs are multiplied by factors of each channel" : "";
  if (!smoothed && SameCodes(format, target.format)) {
    FMOE_ASSIGN_OR_RETURN(why, TryKeepCodes(matrices, target, result));
    if (why.empty()) {
      return result;
    }
  }
  const bool mx_to_nvfp4 =
      !smoothed && format.element == DType::kF4E2M1 && format.block_scale_dtype == DType::kF8E8M0 &&
      target.format.element == DType::kF4E2M1 && target.format.block == GroupShape{1, 16};
  if (mx_to_nvfp4) {
    if (auto exact = MxAsNvfp4(matrices, target)) {
      return *std::move(exact);
    }
    why = "its exponents lie more than 17 apart";
  }
  if (smoothed && matrices.front()->input_tensor_scale) {
    return Status::Unsupported(
        "its inputs are multiplied by factors of each channel, which the target has no place for, and its "
        "input scale is that of the product");
  }
  if (!target.allow_lossy) {
    return Status::Unsupported(fmt::format("{} cannot become {} without rounding again{}{}", Describe(format),
                                           Describe(target.format), why.empty() ? "" : ": ", why))
        .WithHint(why.find("negative") == std::string::npos
                      ? "--allow-lossy accepts it and states the error"
                      : "--to bf16 or f32 keeps the values; --allow-lossy rounds again and states the error");
  }
  return Requantize(matrices, target);
}

}  // namespace fusedmoe::jobs
