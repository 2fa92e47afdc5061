#include "checkpoint/matrices/matrix_scales.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "checkpoint/matrices/unpack.hpp"
#include "core/checked_math.hpp"
#include "numerics/element_types.hpp"
#include "numerics/finite_rows.hpp"
#include "numerics/rows.hpp"
#include "quant/packing.hpp"
#include "weights/dequantize.hpp"
#include "weights/super_scales.hpp"

namespace fusedmoe::checkpoint {
namespace {

// The extents that a tensor of scales may leave out: [n, 1, k, 1] is [n, k], [n] is [n, 1], [] is [1, 1].
Tensor AsMatrix(const Tensor& tensor, bool column) {
  std::vector<int64_t> dims;
  for (const int64_t dim : tensor.shape().dims()) {
    if (dim != 1) {
      dims.push_back(dim);
    }
  }
  const Shape& stored = tensor.shape();
  if (stored.rank() == 2) {
    return tensor;
  }
  Shape shape{1, 1};
  if (stored.rank() == 4 && stored[1] == 1 && stored[3] == 1) {
    shape = Shape{stored[0], stored[2]};
  } else if (dims.size() == 2) {
    shape = Shape{dims[0], dims[1]};
  } else if (dims.size() == 1) {
    shape = column ? Shape{dims[0], 1} : Shape{1, dims[0]};
  } else if (!dims.empty()) {
    return tensor;
  }
  return Tensor::Borrow(TensorView(tensor.view().data(), tensor.dtype(), shape), tensor.owner());
}

// F32 scales as they multiply codes. The reciprocal of an infinite one would be a zero like any other.
Result<Tensor> AsMultipliers(const Tensor& scales, const LinearFormat& format) {
  if (format.scale_divisor == 1.0F && !format.reciprocal_scale) {
    return scales;
  }
  FMOE_ASSIGN_OR_RETURN(Tensor out, Tensor::Allocate(DType::kF32, scales.shape()));
  const auto* from = scales.view().as<float>();
  std::transform(from, from + scales.shape().count(), out.mutable_view().as<float>(), [&](float scale) {
    if (!format.reciprocal_scale) {
      return scale / format.scale_divisor;
    }
    return std::isfinite(scale) ? 1.0F / scale : std::numeric_limits<float>::quiet_NaN();
  });
  return out;
}

// Scales of channels and of integers are floats, whatever the type of a file's.
bool ScalesAreFloats(const WeightFormat& weight) {
  return weight.has_channel_scale || IsPlainFloat(weight.block_scale_dtype);
}

Status CheckType(const MatrixTensors& tensors, const WeightFormat& weight, const std::string& name,
                 const Tensor& stored) {
  const DType wanted = weight.block_scale_dtype, found = stored.dtype();
  if (wanted == DType::kF8E8M0) {
    return found == DType::kU8 || found == DType::kF8E8M0 ? Status::Ok()
                                                          : tensors.Wrong(name, stored, "U8 or F8_E8M0");
  }
  if (ScalesAreFloats(weight)) {
    return IsPlainFloat(found) || found == DType::kF8E8M0 ? Status::Ok()
                                                          : tensors.Wrong(name, stored, "F32, BF16 or F16");
  }
  return found == wanted ? Status::Ok() : tensors.Wrong(name, stored, DTypeName(wanted));
}

int64_t BlockRows(const WeightFormat& weight) {
  return weight.has_block_scale() ? std::max<int64_t>(weight.block.row, 1) : 1;
}

bool HalvesFollow(const MatrixPlace& place) {
  return place.parts == 2 && !place.interleaved;
}

// Whether up's blocks begin at up's first row, instead of going on through gate and up. Told by the number of
// blocks and, where it fits both, by the writer.
bool HaveOwnBlocks(const MatrixTensors& tensors, const LinearFormat& format, int64_t block_rows,
                   int64_t stored_rows) {
  return HalvesFollow(tensors.place) && format.blocks_begin_at_up &&
         stored_rows == 2 * CeilDiv(tensors.rows, block_rows);
}

// Scales of a part. Where up begins inside a block, row_offset counts its rows that belong to the part
// before.
struct Blocks {
  Tensor scales;
  int64_t row_offset = 0;
};

// The half of a matrix of scales that belongs to this part.
Result<Blocks> HalfOf(const MatrixTensors& tensors, const LinearFormat& format, const std::string& name,
                      Tensor stored, int64_t block_rows) {
  const int64_t stored_rows = stored.dim(tensors.place.in_out ? 1 : 0);
  Blocks half;
  if (HaveOwnBlocks(tensors, format, block_rows, stored_rows)) {
    MatrixTensors blocks = tensors;
    blocks.rows = stored_rows / 2;
    FMOE_ASSIGN_OR_RETURN(half.scales, blocks.Part(std::move(stored), name, 1));
    return half;
  }
  FMOE_ASSIGN_OR_RETURN(half.scales, tensors.Part(std::move(stored), name, block_rows));
  half.row_offset = HalvesFollow(tensors.place) ? tensors.place.part * tensors.rows % block_rows : 0;
  return half;
}

// The scales of this part, one for each block of its rows and columns, however the file lays them out.
Result<Blocks> Arrange(const MatrixTensors& tensors, const LinearFormat& format, const std::string& name,
                       Tensor stored) {
  const WeightFormat& weight = format.weight;
  const int64_t block_rows = BlockRows(weight);
  const int64_t block_cols =
      weight.has_block_scale() && weight.block.col > 0 ? weight.block.col : tensors.cols;
  const int64_t stored_rows = std::max(format.stored_block_rows, block_rows);
  if (tensors.place.in_out && stored.shape().rank() == 4) {
    // ModelOpt's 2-D blocks of fused experts: computed as [out, 1, in, 1], then used in the same order as
    // [in, out], so that the codes need them that way.
    const Shape blocks{CeilDiv(tensors.cols, block_cols),
                       CeilDiv(tensors.rows * tensors.place.parts, stored_rows)};
    if (blocks.count() != stored.shape().count()) {
      return tensors.Wrong(name, stored, fmt::format("{} blocks", blocks.count()));
    }
    stored = Tensor::Borrow(TensorView(stored.view().data(), stored.dtype(), blocks), stored.owner());
  }
  stored = AsMatrix(stored, !format.scale_is_in_out && !tensors.place.in_out);
  if (stored.shape().rank() != 2) {
    return tensors.Wrong(name, stored, "a matrix");
  }
  if (format.scale_is_in_out) {
    FMOE_ASSIGN_OR_RETURN(stored, Transpose(stored.view()));
  }
  FMOE_ASSIGN_OR_RETURN(Blocks part, HalfOf(tensors, format, name, std::move(stored), block_rows));
  Tensor& half = part.scales;
  // Compared as they are stored: once repeated, the scales of smaller blocks would fill the matrix too.
  const int64_t file_rows = tensors.place.parts == 1 ? stored_rows : block_rows;
  const int64_t file_cols = std::max(format.stored_block_cols, block_cols);
  const int64_t want_rows = CeilDiv(part.row_offset + tensors.rows, file_rows);
  const int64_t want_cols = CeilDiv(tensors.cols, file_cols);
  if (half.dim(0) != want_rows || half.dim(1) != want_cols) {
    const std::string blocks =
        weight.has_block_scale() ? fmt::format(", for blocks of {} x {},", file_rows, file_cols) : "";
    return tensors.Wrong(name, half, fmt::format("[{}, {}]{}", want_rows, want_cols, blocks));
  }
  if (file_rows > block_rows) {
    FMOE_ASSIGN_OR_RETURN(half, RepeatRows(half, file_rows / block_rows, CeilDiv(tensors.rows, block_rows)));
  }
  if (file_cols > block_cols) {
    FMOE_ASSIGN_OR_RETURN(half,
                          RepeatColumns(half, file_cols / block_cols, CeilDiv(tensors.cols, block_cols)));
  }
  return part;
}

Status RefuseNegative(const MatrixTensors& tensors, const Tensor& scale, const std::string& name) {
  const TensorView& view = scale.view();
  const FiniteRows finite(view.dtype(), /*may_be_negative=*/false);
  std::vector<float> values(static_cast<size_t>(view.dim(1)));
  for (int64_t r = 0; r < view.dim(0); ++r) {
    if (finite.Hold(view.data() + r * view.stride_bytes(0), view.dim(1))) {
      continue;
    }
    DecodeRow(view.dtype(), view.data() + r * view.stride_bytes(0), 0, view.dim(1), values.data());
    for (int64_t c = 0; c < view.dim(1); ++c) {
      const float value = values[static_cast<size_t>(c)];
      if (!std::signbit(value) && std::isfinite(value)) {
        continue;
      }
      return tensors.store.Blame(
          Status::BadInput(
              fmt::format("the scale at [{}, {}] is {}; finite and >= 0 is required", r, c, value)),
          name);
    }
  }
  return Status::Ok();
}

// The biases of MLX are not bounded by their scales. From 2^33 scales on, code * scale is lost beside the
// bias in fp32: the group is the constant bias, or zero where the bias is below 2^-96 and a scale so much
// smaller could not be represented.
GroupNumbers NumbersOfBias(float scale, float bias) {
  const float size = std::fabs(bias);
  if (size < 0x1p33F * std::fabs(scale)) {
    return NumbersOf(scale, -bias);
  }
  return NumbersOf(0.0F, size < 0x1p-96F ? 0.0F : -bias);
}

}  // namespace

Status ReadScale(const MatrixTensors& tensors, const LinearFormat& format, CanonicalMatrix* matrix) {
  const WeightFormat& weight = format.weight;
  const std::string name = tensors.NameOf(format.scale);
  if (!weight.has_block_scale() && !weight.has_channel_scale) {
    FMOE_ASSIGN_OR_RETURN(const float value, tensors.LoadScale(format.scale));
    matrix->tensor_scale = format.reciprocal_scale ? 1.0F / value : value;
    return Status::Ok();
  }
  FMOE_ASSIGN_OR_RETURN(Tensor stored, tensors.Load(format.scale));
  if (format.bytes_are_exponents && stored.dtype() == DType::kU8) {
    stored = Tensor::Borrow(TensorView(stored.view().data(), DType::kF8E8M0, stored.shape()), stored.owner());
  }
  FMOE_RETURN_IF_ERROR(CheckType(tensors, weight, name, stored));
  const DType found = stored.dtype();
  if (weight.has_channel_scale && tensors.place.item >= 0 && stored.shape().count() == 1) {
    // ModelOpt's fused experts: the "channel" of a stack is the expert.
    FMOE_ASSIGN_OR_RETURN(const Tensor one, ToF32(stored));
    FMOE_ASSIGN_OR_RETURN(matrix->channel_scale, Tensor::Allocate(DType::kF32, Shape{tensors.rows}));
    std::fill_n(matrix->channel_scale.mutable_view().as<float>(), tensors.rows, *one.view().as<float>());
    return Status::Ok();
  }
  FMOE_ASSIGN_OR_RETURN(Blocks blocks, Arrange(tensors, format, name, std::move(stored)));
  Tensor& half = blocks.scales;
  // A canonical matrix may have them, for the writers that use them.
  const bool may_be_negative = GroupScalesMayBeNegative(weight) || RowScalesMayBeNegative(weight);
  if (may_be_negative && !format.negative_scales) {
    FMOE_RETURN_IF_ERROR(RefuseNegative(tensors, half, name));
  }
  if (weight.has_channel_scale || weight.block_scale_dtype == DType::kF32 ||
      (ScalesAreFloats(weight) && found == DType::kF8E8M0) || format.scale_divisor != 1.0F ||
      format.reciprocal_scale) {
    FMOE_ASSIGN_OR_RETURN(half, ToF32(half));
    FMOE_ASSIGN_OR_RETURN(half, AsMultipliers(half, format));
    if (weight.has_channel_scale) {
      matrix->channel_scale =
          Tensor::Borrow(TensorView(half.view().data(), DType::kF32, Shape{tensors.rows}), half.owner());
      return Status::Ok();
    }
    matrix->format.block_scale_dtype = DType::kF32;
  } else {
    const DType as = weight.block_scale_dtype == DType::kF8E8M0 ? DType::kF8E8M0 : found;
    TensorView view(half.view().data(), as, half.shape());
    view.set_stride_bytes(0, half.view().stride_bytes(0));
    half = Tensor::Borrow(view, half.owner());
    matrix->format.block_scale_dtype = as;
  }
  matrix->block_scale = std::move(half);
  matrix->scale_row_offset = blocks.row_offset;
  return Status::Ok();
}

Status ReadBiasesOfGroups(const MatrixTensors& tensors, const LinearFormat& format, CanonicalMatrix* matrix) {
  const std::string name = tensors.NameOf(format.zero_point);
  FMOE_ASSIGN_OR_RETURN(Tensor stored, tensors.Load(format.zero_point));
  FMOE_RETURN_IF_ERROR(CheckType(tensors, format.weight, name, stored));
  FMOE_ASSIGN_OR_RETURN(const Blocks blocks, Arrange(tensors, format, name, std::move(stored)));
  FMOE_ASSIGN_OR_RETURN(const Tensor biases, ToF32(blocks.scales));
  FMOE_RETURN_IF_ERROR(CheckFinite(tensors.store, biases, name));
  FMOE_RETURN_IF_ERROR(CheckFinite(tensors.store, matrix->block_scale, tensors.NameOf(format.scale)));
  const Tensor scales = matrix->block_scale;
  FMOE_ASSIGN_OR_RETURN(matrix->block_scale, Tensor::Allocate(DType::kF32, scales.shape()));
  FMOE_ASSIGN_OR_RETURN(matrix->zero_point, Tensor::Allocate(DType::kF32, scales.shape()));
  auto* const steps = matrix->block_scale.mutable_view().as<float>();
  auto* const zeros = matrix->zero_point.mutable_view().as<float>();
  for (int64_t i = 0; i < scales.shape().count(); ++i) {
    const GroupNumbers numbers = NumbersOfBias(scales.view().as<float>()[i], biases.view().as<float>()[i]);
    steps[i] = numbers.scale;
    zeros[i] = numbers.zero;
  }
  return Status::Ok();
}

}  // namespace fusedmoe::checkpoint
