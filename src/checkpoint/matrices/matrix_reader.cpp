#include "checkpoint/matrices/matrix_reader.hpp"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <iterator>
#include <utility>

#include <fmt/format.h>

#include "checkpoint/matrices/matrix_codes.hpp"
#include "checkpoint/matrices/matrix_scales.hpp"
#include "checkpoint/matrices/unpack.hpp"
#include "numerics/element_types.hpp"
#include "weights/dequantize.hpp"

namespace fusedmoe::checkpoint {
namespace {

Status ReadZeroPoints(const MatrixTensors& tensors, const LinearFormat& format, CanonicalMatrix* matrix) {
  if (format.zero_point_is_bias) {
    return ReadBiasesOfGroups(tensors, format, matrix);
  }
  const std::string name = tensors.NameOf(format.zero_point);
  if (format.zero_point_optional && !tensors.store.Has(name)) {
    return Status::Ok();
  }
  FMOE_ASSIGN_OR_RETURN(const Tensor stored, tensors.Load(format.zero_point));
  const int64_t groups = matrix->block_scale.dim(1);
  if (format.weight.zero_point_dtype == DType::kF32) {  // as they act
    const Shape wanted{tensors.rows * tensors.place.parts, groups};
    if (stored.dtype() != DType::kF32 || !(stored.shape() == wanted)) {
      return tensors.Wrong(name, stored, fmt::format("F32 {}", wanted.ToString()));
    }
    FMOE_ASSIGN_OR_RETURN(matrix->zero_point, tensors.Part(stored, name, 1));
    return Status::Ok();
  }
  Result<Tensor> zeros = UnpackZeroPoints(format, stored, tensors.rows * tensors.place.parts, groups);
  if (!zeros.ok()) {
    return tensors.store.Blame(std::move(zeros).status(), name);
  }
  FMOE_ASSIGN_OR_RETURN(matrix->zero_point, tensors.Part(*std::move(zeros), name, 1));
  return Status::Ok();
}

// Units of scales and minima, as F16.
Result<Tensor> ReadUnits(const MatrixTensors& tensors, std::string_view suffix, const LinearFormat& format) {
  if (suffix.empty()) {
    return Tensor();
  }
  const std::string name = tensors.NameOf(suffix);
  FMOE_ASSIGN_OR_RETURN(Tensor stored, tensors.Load(suffix));
  const Shape wanted{tensors.rows * tensors.place.parts,
                     tensors.cols / std::max(format.weight.super_cols, format.stored.super_cols)};
  if (stored.dtype() != DType::kF16 || !(stored.shape() == wanted)) {
    return tensors.Wrong(name, stored, fmt::format("F16 {}", wanted.ToString()));
  }
  return tensors.Part(std::move(stored), name, 1);
}

Status ReadBias(const MatrixTensors& tensors, CanonicalMatrix* matrix) {
  const std::string name = tensors.NameOf(".bias");
  if (!tensors.store.Has(name)) {
    return tensors.place.needs_bias
               ? tensors.store.Blame(
                     Status::BadInput("the tensor is missing; other projections of the layer have biases"),
                     name)
               : Status::Ok();
  }
  FMOE_ASSIGN_OR_RETURN(Tensor stored, tensors.Load(".bias"));
  if (!IsFloat(stored.dtype())) {
    return tensors.Wrong(name, stored, "BF16, F16 or F32");
  }
  FMOE_ASSIGN_OR_RETURN(Tensor bias, ToF32(stored));
  if (bias.shape().rank() != 1 || bias.dim(0) != tensors.rows * tensors.place.parts) {
    return tensors.Wrong(name, stored, fmt::format("[{}]", tensors.rows * tensors.place.parts));
  }
  if (tensors.place.parts == 1) {
    matrix->bias = std::move(bias);
    return Status::Ok();
  }
  FMOE_ASSIGN_OR_RETURN(Tensor half, Tensor::Allocate(DType::kF32, Shape{tensors.rows}));
  const auto* from = bias.view().as<float>();
  auto* to = half.mutable_view().as<float>();
  for (int64_t r = 0; r < tensors.rows; ++r) {
    to[r] = tensors.place.interleaved ? from[2 * r + tensors.place.part]
                                      : from[tensors.place.part * tensors.rows + r];
  }
  matrix->bias = std::move(half);
  return Status::Ok();
}

Status CheckShapeTensor(const MatrixTensors& tensors, const LinearFormat& format) {
  const std::string name = tensors.NameOf(format.shape);
  FMOE_ASSIGN_OR_RETURN(const Tensor stored, tensors.Load(format.shape));
  if ((stored.dtype() != DType::kI64 && stored.dtype() != DType::kI32) || stored.shape().count() != 2) {
    return tensors.Wrong(name, stored, "I64 or I32 [2]");
  }
  int64_t shape[2] = {0, 0};
  if (stored.dtype() == DType::kI64) {
    std::memcpy(shape, stored.view().data(), sizeof(shape));
  } else {
    int32_t narrow[2];
    std::memcpy(narrow, stored.view().data(), sizeof(narrow));
    std::copy(std::begin(narrow), std::end(narrow), shape);
  }
  if (shape[0] == tensors.rows * tensors.place.parts && shape[1] == tensors.cols) {
    return Status::Ok();
  }
  return tensors.store.Blame(
      Status::BadInput(fmt::format("says [{}, {}], but the matrix is [{}, {}]", shape[0], shape[1],
                                   tensors.rows * tensors.place.parts, tensors.cols)),
      name);
}

// Symmetric weights may have zero points of 0 beside them, one by one, as some tools leave them; those that
// are packed into words are stored for asymmetric weights alone, and 0 is another number there.
Status CheckNoZeroPoint(const MatrixTensors& tensors, const LinearFormat& format) {
  const std::string name = tensors.NameOf(format.no_zero_point);
  if (!tensors.store.Has(name)) {
    return Status::Ok();
  }
  FMOE_ASSIGN_OR_RETURN(const Tensor stored, tensors.Load(format.no_zero_point));
  const auto* const first = stored.view().data();
  const bool zeros =
      stored.view().dense() && std::all_of(first, first + stored.view().total_bytes(),
                                           [](std::byte byte) { return byte == std::byte{0}; });
  if (zeros && (format.packing == Packing::kDirect || stored.dtype() != DType::kI32)) {
    return Status::Ok();
  }
  return tensors.store.Blame(
      Status::BadInput(fmt::format("{} {} are zero points, but the metadata say that weights are symmetric",
                                   DTypeName(stored.dtype()), stored.shape().ToString()))
          .WithHint("\"symmetric\": false where they count; without the tensor where they do not"),
      name);
}

Status CheckRowMajor(const MatrixTensors& tensors, const LinearFormat& format) {
  const std::string name = tensors.NameOf(format.row_major);
  if (!tensors.store.Has(name)) {
    return Status::Ok();
  }
  FMOE_ASSIGN_OR_RETURN(const Tensor stored, tensors.Load(format.row_major));
  if (stored.dtype() != DType::kU8 || stored.shape().count() != 1) {
    return tensors.Wrong(name, stored, "one U8");
  }
  const int layout = std::to_integer<int>(*stored.view().data());
  if (layout == 0) {
    return Status::Ok();
  }
  return tensors.store.Blame(
      Status::Unsupported(fmt::format("codes in layout {} are not supported; 0, row by row, is", layout)),
      name);
}

// A group that the row does not fill would be read as one that it does: nothing says which columns it has.
Status CheckWholeGroups(const MatrixTensors& tensors, const LinearFormat& format) {
  const int64_t group = format.weight.block.col;
  if (group <= 0 || tensors.cols % group == 0) {
    return Status::Ok();
  }
  return tensors.store.Blame(
      Status::BadInput(
          fmt::format("group_size {} does not divide the {} columns of the matrix", group, tensors.cols))
          .WithHint(
              "quantize with a group_size that does, or leave these modules unquantized; tools that write "
              "this format do not write such groups, and vLLM does not read them"),
      tensors.NameOf(format.scale));
}

// ValidateCanonical names fields; the file has tensors.
Status BlameField(const MatrixTensors& tensors, const LinearFormat& format, Status status) {
  const std::string_view message = status.message();
  const bool first_is_tensor = !format.weight.has_block_scale() && !format.weight.has_channel_scale;
  const std::pair<std::string_view, std::string_view> fields[] = {
      {"block_scale", format.scale},
      {"channel_scale", format.scale},
      {"tensor_scale", first_is_tensor ? format.scale : format.second_scale},
      {"input_tensor_scale", format.input_scale},
      {"zero_point", format.zero_point},
      {"super_scale", format.super_scale},
      {"super_minimum", format.super_minimum},
      {"group_index", format.group_index},
      {"pre_quant_scale", format.pre_quant_scale},
      {"bias", ".bias"}};
  for (const auto& [field, suffix] : fields) {
    if (message.starts_with(field)) {
      return tensors.store.Blame(std::move(status), tensors.NameOf(suffix));
    }
  }
  return tensors.store.Blame(std::move(status), tensors.NameOf(format.codes));
}

}  // namespace

Result<Tensor> ReadGroupIndex(const MatrixTensors& tensors, const LinearFormat& format) {
  const std::string name = tensors.NameOf(format.group_index);
  if (!tensors.store.Has(name) && !format.group_index_required) {
    return Tensor();
  }
  FMOE_ASSIGN_OR_RETURN(Tensor index, tensors.Load(format.group_index));
  if (index.dtype() != DType::kI32 || !(index.shape() == Shape{tensors.cols})) {
    return tensors.Wrong(name, index, fmt::format("I32 [{}]", tensors.cols));
  }
  const auto* values = index.view().as<int32_t>();
  const int64_t group = format.weight.block.col;
  bool plain = group > 0;
  for (int64_t c = 0; c < tensors.cols && plain; ++c) {
    int32_t value = 0;
    std::memcpy(&value, values + c, sizeof(value));
    plain = value == c / group;
  }
  return plain ? Tensor() : std::move(index);
}

Result<CanonicalMatrix> ReadMatrix(const TensorStore& store, const LinearFormat& format,
                                   const MatrixPlace& place, int64_t rows, int64_t cols,
                                   JoinedTensors* joined) {
  BlockParts beside;
  const MatrixTensors tensors{store, place, rows, cols, joined, &beside};
  CanonicalMatrix matrix;
  matrix.rows = rows;
  matrix.cols = cols;
  matrix.format = format.weight;
  matrix.stored = format.stored;
  if (format.whole_groups) {
    FMOE_RETURN_IF_ERROR(CheckWholeGroups(tensors, format));
  }
  FMOE_ASSIGN_OR_RETURN(matrix.codes, ReadCodes(tensors, format));
  if (!format.quantized()) {
    matrix.format.element = matrix.codes.dtype();
  }
  if (!format.shape.empty()) {
    FMOE_RETURN_IF_ERROR(CheckShapeTensor(tensors, format));
  }
  if (!format.no_zero_point.empty()) {
    FMOE_RETURN_IF_ERROR(CheckNoZeroPoint(tensors, format));
  }
  if (!format.row_major.empty()) {
    FMOE_RETURN_IF_ERROR(CheckRowMajor(tensors, format));
  }
  if (!format.scale.empty()) {
    FMOE_RETURN_IF_ERROR(ReadScale(tensors, format, &matrix));
  }
  if (!format.second_scale.empty()) {
    FMOE_ASSIGN_OR_RETURN(const float stored, tensors.LoadScale(format.second_scale));
    matrix.tensor_scale = (format.reciprocal ? 1.0F / stored : stored) / format.second_scale_divisor;
  }
  if (!format.zero_point.empty()) {
    FMOE_RETURN_IF_ERROR(ReadZeroPoints(tensors, format, &matrix));
  }
  FMOE_ASSIGN_OR_RETURN(matrix.super_scale, ReadUnits(tensors, format.super_scale, format));
  FMOE_ASSIGN_OR_RETURN(matrix.super_minimum, ReadUnits(tensors, format.super_minimum, format));
  if (!format.group_index.empty()) {
    FMOE_ASSIGN_OR_RETURN(matrix.group_index, ReadGroupIndex(tensors, format));
  }
  if (!format.input_scale.empty() && (!format.input_scale_optional || tensors.Has(format.input_scale))) {
    FMOE_ASSIGN_OR_RETURN(const float stored, tensors.LoadScale(format.input_scale));
    matrix.input_tensor_scale = format.reciprocal ? 1.0F / stored : stored;
  }
  if (!format.pre_quant_scale.empty() && tensors.Has(format.pre_quant_scale)) {
    const std::string name = tensors.NameOf(format.pre_quant_scale);
    FMOE_ASSIGN_OR_RETURN(const Tensor stored, tensors.Load(format.pre_quant_scale));
    FMOE_ASSIGN_OR_RETURN(matrix.pre_quant_scale, ToF32(stored));
    if (!(stored.shape() == Shape{cols})) {
      return tensors.Wrong(name, stored, fmt::format("[{}]", cols));
    }
  }
  FMOE_RETURN_IF_ERROR(ReadBias(tensors, &matrix));
  if (Status status = ValidateCanonical(matrix); !status.ok()) {
    return BlameField(tensors, format, std::move(status));
  }
  return matrix;
}

}  // namespace fusedmoe::checkpoint
