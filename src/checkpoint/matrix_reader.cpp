#include "checkpoint/matrix_reader.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include <fmt/format.h>

#include "checkpoint/unpack.hpp"
#include "core/checked_math.hpp"
#include "numerics/rows.hpp"
#include "weights/dequantize.hpp"

namespace fusedmoe::checkpoint {
std::string RoleName(const TensorStore& store, const MatrixPlace& place, std::string_view suffix) {
  const std::string plain = place.base + std::string(suffix);
  if (place.weight_suffix == ".weight")
    return plain;
  // Parameters of fused modules are tensors themselves: "gate_up_proj", "gate_up_proj_weight_scale"
  // (ModelOpt), "gate_up_proj_scale_inv" (transformers), "gate_up_proj_scales" (gpt-oss).
  if (suffix == ".weight")
    return place.base;
  std::string_view word = suffix;
  if (word.starts_with('.') || word.starts_with('_'))
    word.remove_prefix(1);
  const std::string with_underscore = place.base + "_" + std::string(word);
  if (store.Has(with_underscore))
    return with_underscore;
  if (word.starts_with("weight_")) {
    const std::string shorter = place.base + "_" + std::string(word.substr(7));
    if (store.Has(shorter))
      return shorter;
  }
  return store.Has(plain) ? plain : with_underscore;
}

namespace {

// One matrix and what is known about its storage while it is read.
class Reader {
 public:
  Reader(const TensorStore& store, const LinearFormat& format, const MatrixPlace& place, int64_t rows,
         int64_t cols)
      : store_(store), format_(format), place_(place), rows_(rows), cols_(cols) {}

  Result<CanonicalMatrix> Read();

 private:
  // The tensor that holds the role of `suffix`; its preferred spelling when there is none.
  std::string NameOf(std::string_view suffix) const { return RoleName(store_, place_, suffix); }
  Result<Tensor> LoadRole(std::string_view suffix) const;
  Result<Tensor> Half(Tensor tensor, const std::string& name, int64_t block) const;
  Result<Tensor> ReadCodes();
  Result<Tensor> CodesAlongOut(const Tensor& stored, const std::string& name) const;
  Status ReadScale(CanonicalMatrix* matrix);
  bool ScalesAreFloats() const;
  Status CheckScaleType(const std::string& name, const Tensor& stored) const;
  Result<Tensor> ArrangeScales(const std::string& name, Tensor stored);
  Status RefuseNegative(const Tensor& scale, const std::string& name) const;
  Status ReadZeroPoints(CanonicalMatrix* matrix);
  Status ReadGroupIndex(CanonicalMatrix* matrix) const;
  Result<float> ReadScalar(std::string_view suffix) const;
  Status ReadBias(CanonicalMatrix* matrix) const;
  Status CheckShapeTensor() const;
  Status CheckRowMajor() const;
  Status Wrong(const std::string& name, const Tensor& tensor, std::string_view wanted) const;
  Status BlameField(Status status) const;

  const TensorStore& store_;
  const LinearFormat& format_;
  const MatrixPlace& place_;
  int64_t rows_, cols_;
  int64_t scale_row_offset_ = 0;
};

Status Reader::Wrong(const std::string& name, const Tensor& tensor, std::string_view wanted) const {
  return store_.Blame(Status::BadInput(fmt::format("{} {}; {} is needed", DTypeName(tensor.dtype()),
                                                   tensor.shape().ToString(), wanted)),
                      name);
}

Result<Tensor> Reader::LoadRole(std::string_view suffix) const {
  const std::string name = NameOf(suffix);
  if (place_.item < 0)
    return store_.Load(name);
  const TensorInfo* info = store_.Find(name);
  if (info == nullptr)
    return store_.Load(name);  // the error that names it
  if (place_.flattened) {
    const int64_t length = info->shape.rank() == 2 ? info->shape[0] : 0;
    if (length == 0 || length % place_.num_items != 0) {
      return store_.Blame(Status::BadInput(fmt::format("{}; rows for {} experts are needed",
                                                       info->shape.ToString(), place_.num_items)),
                          name);
    }
    const int64_t each = length / place_.num_items;
    return store_.LoadRows(name, place_.item * each, each);
  }
  if (info->shape.rank() == 0 || (info->shape.rank() == 1 && info->shape[0] == 1 && place_.num_items != 1)) {
    return store_.Load(name);  // one number for all experts
  }
  if (info->shape[0] != place_.num_items && info->shape[0] != place_.num_items + place_.spare_items) {
    return store_.Blame(Status::BadInput(fmt::format("{}; the first dimension must be the {} experts",
                                                     info->shape.ToString(), place_.num_items)),
                        name);
  }
  return store_.LoadItem(name, place_.item);
}

// From a 2-D tensor over all outputs of the module to [outputs of this part, columns]; `block` outputs share
// a row.
Result<Tensor> Reader::Half(Tensor tensor, const std::string& name, int64_t block) const {
  if (tensor.shape().rank() != 2)
    return Wrong(name, tensor, "a matrix");
  if (place_.in_out) {
    FMOE_ASSIGN_OR_RETURN(tensor, Transpose(tensor));
  }
  if (place_.parts == 1)
    return tensor;
  const TensorView view = tensor.view();
  if (place_.interleaved) {
    if (block != 1)
      return tensor;  // blocks hold rows of both
    if (view.dim(0) % 2 != 0)
      return Wrong(name, tensor, "an even number of rows, alternating gate and up");
    TensorView half(view.data() + place_.part * view.stride_bytes(0), view.dtype(),
                    Shape{view.dim(0) / 2, view.dim(1)});
    half.set_stride_bytes(0, 2 * view.stride_bytes(0));
    return Tensor::Borrow(half, tensor.owner());
  }
  const int64_t first = place_.part * rows_ / block;
  const int64_t count = CeilDiv((place_.part + 1) * rows_, block) - first;
  if (view.dim(0) != CeilDiv(2 * rows_, block))
    return Wrong(name, tensor, fmt::format("{} rows", CeilDiv(2 * rows_, block)));
  return Tensor::Borrow(view.Rows(first, count), tensor.owner());
}

Result<Tensor> Reader::ReadCodes() {
  const std::string name = NameOf(format_.codes);
  FMOE_ASSIGN_OR_RETURN(Tensor stored, LoadRole(format_.codes));
  const DType element = format_.weight.element;
  if (format_.packing != Packing::kDirect) {
    const bool has_zero_points = !format_.zero_point.empty() && store_.Has(NameOf(format_.zero_point));
    Result<Tensor> unpacked = UnpackCodes(format_, stored, rows_ * place_.parts, cols_, has_zero_points);
    if (!unpacked.ok())
      return store_.Blame(std::move(unpacked).status(), name);
    return Half(*std::move(unpacked), name, 1);
  }
  // gpt-oss keeps the bytes of a group in an axis of their own.
  if (stored.shape().rank() == 3 && stored.view().dense()) {
    const Shape flat{stored.dim(0), stored.dim(1) * stored.dim(2)};
    stored = Tensor::Borrow(TensorView(stored.view().data(), stored.dtype(), flat), stored.owner());
  }
  if (stored.shape().rank() != 2)
    return Wrong(name, stored, "a matrix");
  const int bits = DTypeBits(element);
  const DType found = stored.dtype();
  const bool packed_bytes = bits < 8 && (found == DType::kU8 || found == DType::kI8);
  const bool same = found == element;
  const bool plain =
      !format_.quantized() && (found == DType::kF32 || found == DType::kF16 || found == DType::kBF16);
  const bool widened = format_.bits > 0 && found == DType::kI8 && element == DType::kI4;
  const bool centered = format_.bits == 8 && found == DType::kI8 && element == DType::kU8;
  if (!packed_bytes && !same && !plain && !widened && !centered) {
    return Wrong(name, stored,
                 fmt::format("{}", bits < 8                ? "U8"
                                   : element == DType::kU8 ? "I8"
                                   : format_.quantized()   ? DTypeName(element)
                                                           : "BF16, F16 or F32"));
  }
  const bool nibbles = packed_bytes && !widened;
  if (nibbles)
    stored = Tensor::Borrow(TensorView(stored.view().data(), DType::kU8, stored.shape()), stored.owner());
  if (same && bits < 8) {
    const Shape bytes{stored.dim(0), stored.view().row_bytes()};
    stored = Tensor::Borrow(TensorView(stored.view().data(), DType::kU8, bytes), stored.owner());
  }
  if (nibbles && format_.codes_along_out)
    return CodesAlongOut(stored, name);
  FMOE_ASSIGN_OR_RETURN(Tensor half, Half(std::move(stored), name, 1));
  const bool in_bytes = nibbles || (same && bits < 8);
  const int64_t width = in_bytes ? PackedBytes(element, cols_) : cols_;
  if (half.dim(0) != rows_ || half.dim(1) != width || (in_bytes && cols_ * bits % 8 != 0)) {
    return Wrong(name, half, fmt::format("[{}, {}]", rows_, width));
  }
  if (widened)
    return PackSigned4(half);
  if (centered)
    return AroundMiddle(half);
  if (!in_bytes)
    return half;
  TensorView view(half.view().data(), element, Shape{rows_, cols_});
  view.set_stride_bytes(0, half.view().stride_bytes(0));
  return Tensor::Borrow(view, half.owner());
}

// U8 [in, out / 2], two neighbouring outputs a byte, as nibbles along the input.
Result<Tensor> Reader::CodesAlongOut(const Tensor& stored, const std::string& name) const {
  FMOE_ASSIGN_OR_RETURN(Tensor bytes, UnpackNibbles(stored));
  FMOE_ASSIGN_OR_RETURN(const Tensor half, Half(std::move(bytes), name, 1));
  if (half.dim(0) != rows_ || half.dim(1) != cols_ || cols_ % 2 != 0) {
    return Wrong(name, stored, fmt::format("[{}, {}]", cols_, rows_ * place_.parts / 2));
  }
  return PackNibbles(half, format_.weight.element);
}

// The extents that a tensor of scales may leave out: [n, 1, k, 1] is [n, k], [n] is [n, 1], [] is [1, 1].
Tensor AsMatrix(const Tensor& tensor, bool column) {
  std::vector<int64_t> dims;
  for (const int64_t dim : tensor.shape().dims()) {
    if (dim != 1)
      dims.push_back(dim);
  }
  const Shape& stored = tensor.shape();
  if (stored.rank() == 2)
    return tensor;
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

Result<Tensor> Divided(const Tensor& scales, float divisor) {
  if (divisor == 1.0F)
    return scales;
  FMOE_ASSIGN_OR_RETURN(Tensor out, Tensor::Allocate(DType::kF32, scales.shape()));
  const auto* from = scales.view().as<float>();
  std::transform(from, from + scales.shape().count(), out.mutable_view().as<float>(),
                 [&](float scale) { return scale / divisor; });
  return out;
}

// Scales of channels and of integers are floats, whatever the type of a file's.
bool Reader::ScalesAreFloats() const {
  return format_.weight.has_channel_scale || IsPlainFloat(format_.weight.block_scale_dtype);
}

Status Reader::CheckScaleType(const std::string& name, const Tensor& stored) const {
  const DType wanted = format_.weight.block_scale_dtype, found = stored.dtype();
  if (wanted == DType::kF8E8M0) {
    return found == DType::kU8 || found == DType::kF8E8M0 ? Status::Ok()
                                                          : Wrong(name, stored, "U8 or F8_E8M0");
  }
  if (ScalesAreFloats()) {
    return IsPlainFloat(found) || found == DType::kF8E8M0 ? Status::Ok()
                                                          : Wrong(name, stored, "F32, BF16 or F16");
  }
  return found == wanted ? Status::Ok() : Wrong(name, stored, DTypeName(wanted));
}

// The scales of this part, one for each block of its rows and columns, however the file lays them out.
Result<Tensor> Reader::ArrangeScales(const std::string& name, Tensor stored) {
  const WeightFormat& weight = format_.weight;
  const int64_t block_rows = weight.has_block_scale() ? std::max<int64_t>(weight.block.row, 1) : 1;
  const int64_t block_cols = weight.has_block_scale() && weight.block.col > 0 ? weight.block.col : cols_;
  const int64_t stored_rows = std::max(format_.stored_block_rows, block_rows);
  if (place_.in_out && stored.shape().rank() == 4) {
    // ModelOpt's 2-D blocks of fused experts: computed as [out, 1, in, 1], then used in the same order as
    // [in, out], so that the codes need them that way.
    const Shape blocks{CeilDiv(cols_, block_cols), CeilDiv(rows_ * place_.parts, stored_rows)};
    if (blocks.count() != stored.shape().count())
      return Wrong(name, stored, fmt::format("{} blocks", blocks.count()));
    stored = Tensor::Borrow(TensorView(stored.view().data(), stored.dtype(), blocks), stored.owner());
  }
  if (format_.scale_is_in_out) {
    FMOE_ASSIGN_OR_RETURN(stored, Transpose(AsMatrix(stored, false)));
  } else {
    stored = AsMatrix(stored, !place_.in_out);
  }
  FMOE_ASSIGN_OR_RETURN(Tensor half, Half(std::move(stored), name, block_rows));
  if (stored_rows > block_rows && place_.parts == 1) {
    FMOE_ASSIGN_OR_RETURN(half, RepeatRows(half, stored_rows / block_rows, CeilDiv(rows_, block_rows)));
  }
  scale_row_offset_ = place_.parts == 2 && !place_.interleaved ? place_.part * rows_ % block_rows : 0;
  const int64_t want_rows = CeilDiv(scale_row_offset_ + rows_, block_rows);
  const int64_t want_cols = CeilDiv(cols_, block_cols);
  if (half.dim(0) != want_rows || half.dim(1) != want_cols) {
    return Wrong(name, half, fmt::format("[{}, {}]", want_rows, want_cols));
  }
  return half;
}

Status Reader::ReadScale(CanonicalMatrix* matrix) {
  const WeightFormat& weight = format_.weight;
  const std::string name = NameOf(format_.scale);
  if (!weight.has_block_scale() && !weight.has_channel_scale) {
    FMOE_ASSIGN_OR_RETURN(const float value, ReadScalar(format_.scale));
    matrix->tensor_scale = value;
    return Status::Ok();
  }
  FMOE_ASSIGN_OR_RETURN(Tensor stored, LoadRole(format_.scale));
  FMOE_RETURN_IF_ERROR(CheckScaleType(name, stored));
  const DType found = stored.dtype();
  if (weight.has_channel_scale && place_.item >= 0 && stored.shape().count() == 1) {
    // ModelOpt's fused experts: the "channel" of a stack is the expert.
    FMOE_ASSIGN_OR_RETURN(const Tensor one, ToF32(stored));
    FMOE_ASSIGN_OR_RETURN(matrix->channel_scale, Tensor::Allocate(DType::kF32, Shape{rows_}));
    std::fill_n(matrix->channel_scale.mutable_view().as<float>(), rows_, *one.view().as<float>());
    return Status::Ok();
  }
  FMOE_ASSIGN_OR_RETURN(Tensor half, ArrangeScales(name, std::move(stored)));
  if (weight.has_channel_scale || weight.block_scale_dtype == DType::kF32 ||
      (ScalesAreFloats() && found == DType::kF8E8M0) || format_.scale_divisor != 1.0F) {
    FMOE_ASSIGN_OR_RETURN(half, ToF32(half));
    FMOE_ASSIGN_OR_RETURN(half, Divided(half, format_.scale_divisor));
    if (weight.has_channel_scale) {
      matrix->channel_scale =
          Tensor::Borrow(TensorView(half.view().data(), DType::kF32, Shape{rows_}), half.owner());
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
  if (format_.weight.may_have_zero_point && !format_.negative_scales)
    FMOE_RETURN_IF_ERROR(RefuseNegative(half, name));
  matrix->block_scale = std::move(half);
  matrix->scale_row_offset = scale_row_offset_;
  return Status::Ok();
}

Status Reader::RefuseNegative(const Tensor& scale, const std::string& name) const {
  const TensorView& view = scale.view();
  std::vector<float> values(static_cast<size_t>(view.dim(1)));
  for (int64_t r = 0; r < view.dim(0); ++r) {
    DecodeRow(view.dtype(), view.data() + r * view.stride_bytes(0), 0, view.dim(1), values.data());
    for (int64_t c = 0; c < view.dim(1); ++c) {
      const float value = values[static_cast<size_t>(c)];
      if (!std::signbit(value) && std::isfinite(value))
        continue;
      return store_.Blame(Status::BadInput(fmt::format(
                              "the scale at [{}, {}] is {}; finite and >= 0 is required", r, c, value)),
                          name);
    }
  }
  return Status::Ok();
}

Status Reader::ReadZeroPoints(CanonicalMatrix* matrix) {
  const std::string name = NameOf(format_.zero_point);
  if (format_.zero_point_optional && !store_.Has(name))
    return Status::Ok();
  FMOE_ASSIGN_OR_RETURN(const Tensor stored, LoadRole(format_.zero_point));
  const int64_t groups = matrix->block_scale.dim(1);
  Result<Tensor> zeros = UnpackZeroPoints(format_, stored, rows_ * place_.parts, groups);
  if (!zeros.ok())
    return store_.Blame(std::move(zeros).status(), name);
  FMOE_ASSIGN_OR_RETURN(matrix->zero_point, Half(*std::move(zeros), name, 1));
  return Status::Ok();
}

Status Reader::ReadGroupIndex(CanonicalMatrix* matrix) const {
  const std::string name = NameOf(format_.group_index);
  if (!store_.Has(name))
    return Status::Ok();
  FMOE_ASSIGN_OR_RETURN(Tensor index, LoadRole(format_.group_index));
  if (index.dtype() != DType::kI32 || !(index.shape() == Shape{cols_}))
    return Wrong(name, index, fmt::format("I32 [{}]", cols_));
  // An index in order is the plain grouping, which kernels like better.
  const auto* values = index.view().as<int32_t>();
  const int64_t group = matrix->format.block.col;
  bool plain = group > 0;
  for (int64_t c = 0; c < cols_ && plain; ++c) {
    int32_t value = 0;
    std::memcpy(&value, values + c, sizeof(value));
    plain = value == c / group;
  }
  if (!plain)
    matrix->group_index = std::move(index);
  return Status::Ok();
}

Result<float> Reader::ReadScalar(std::string_view suffix) const {
  const std::string name = NameOf(suffix);
  FMOE_ASSIGN_OR_RETURN(Tensor stored, LoadRole(suffix));
  // [E, 2]: gate and up each have their own.
  if (stored.shape().count() == 2 && place_.parts == 2 && stored.shape().rank() == 1) {
    FMOE_ASSIGN_OR_RETURN(const Tensor both, ToF32(stored));
    return both.view().as<float>()[place_.part];
  }
  const DType found = stored.dtype();
  if (stored.shape().count() != 1 ||
      (found != DType::kF32 && found != DType::kBF16 && found != DType::kF16)) {
    return Wrong(name, stored, "one F32, BF16 or F16");
  }
  float value = 0.0F;
  DecodeRow(found, stored.view().data(), 0, 1, &value);
  if (!std::isfinite(value) || value <= 0.0F) {
    return store_.Blame(Status::BadInput(fmt::format("the scale is {}; finite and > 0 is required", value)),
                        name);
  }
  return value;
}

Status Reader::ReadBias(CanonicalMatrix* matrix) const {
  const std::string name = NameOf(".bias");
  if (!store_.Has(name)) {
    return place_.needs_bias ? store_.Load(name).status() : Status::Ok();
  }
  FMOE_ASSIGN_OR_RETURN(Tensor stored, LoadRole(".bias"));
  if (!IsFloat(stored.dtype()))
    return Wrong(name, stored, "BF16, F16 or F32");
  FMOE_ASSIGN_OR_RETURN(Tensor bias, ToF32(stored));
  if (bias.shape().rank() != 1 || bias.dim(0) != rows_ * place_.parts) {
    return Wrong(name, stored, fmt::format("[{}]", rows_ * place_.parts));
  }
  if (place_.parts == 1) {
    matrix->bias = std::move(bias);
    return Status::Ok();
  }
  FMOE_ASSIGN_OR_RETURN(Tensor half, Tensor::Allocate(DType::kF32, Shape{rows_}));
  const auto* from = bias.view().as<float>();
  auto* to = half.mutable_view().as<float>();
  for (int64_t r = 0; r < rows_; ++r)
    to[r] = place_.interleaved ? from[2 * r + place_.part] : from[place_.part * rows_ + r];
  matrix->bias = std::move(half);
  return Status::Ok();
}

Status Reader::CheckShapeTensor() const {
  const std::string name = NameOf(format_.shape);
  FMOE_ASSIGN_OR_RETURN(const Tensor stored, LoadRole(format_.shape));
  if (stored.dtype() != DType::kI64 || stored.shape().count() != 2)
    return Wrong(name, stored, "I64 [2]");
  int64_t shape[2] = {0, 0};
  std::memcpy(shape, stored.view().data(), sizeof(shape));
  if (shape[0] == rows_ * place_.parts && shape[1] == cols_)
    return Status::Ok();
  return store_.Blame(Status::BadInput(fmt::format("says [{}, {}], but the matrix is [{}, {}]", shape[0],
                                                   shape[1], rows_ * place_.parts, cols_)),
                      name);
}

Status Reader::CheckRowMajor() const {
  const std::string name = NameOf(format_.row_major);
  if (!store_.Has(name))
    return Status::Ok();
  FMOE_ASSIGN_OR_RETURN(const Tensor stored, LoadRole(format_.row_major));
  if (stored.dtype() != DType::kU8 || stored.shape().count() != 1)
    return Wrong(name, stored, "one U8");
  const int layout = std::to_integer<int>(*stored.view().data());
  if (layout == 0)
    return Status::Ok();
  return store_.Blame(
      Status::Unsupported(fmt::format("codes in layout {} are not supported; 0, row by row, is", layout)),
      name);
}

// ValidateCanonical names fields; the file has tensors.
Status Reader::BlameField(Status status) const {
  const std::string_view message = status.message();
  const bool first_is_tensor = !format_.weight.has_block_scale() && !format_.weight.has_channel_scale;
  const std::pair<std::string_view, std::string_view> fields[] = {
      {"block_scale", format_.scale},
      {"channel_scale", format_.scale},
      {"tensor_scale", first_is_tensor ? format_.scale : format_.second_scale},
      {"input_tensor_scale", format_.input_scale},
      {"zero_point", format_.zero_point},
      {"group_index", format_.group_index},
      {"pre_quant_scale", format_.pre_quant_scale},
      {"bias", ".bias"}};
  for (const auto& [field, suffix] : fields) {
    if (message.starts_with(field))
      return store_.Blame(std::move(status), NameOf(suffix));
  }
  return store_.Blame(std::move(status), NameOf(format_.codes));
}

Result<CanonicalMatrix> Reader::Read() {
  CanonicalMatrix matrix;
  matrix.rows = rows_;
  matrix.cols = cols_;
  matrix.format = format_.weight;
  FMOE_ASSIGN_OR_RETURN(matrix.codes, ReadCodes());
  if (!format_.quantized())
    matrix.format.element = matrix.codes.dtype();
  if (!format_.shape.empty())
    FMOE_RETURN_IF_ERROR(CheckShapeTensor());
  if (!format_.row_major.empty())
    FMOE_RETURN_IF_ERROR(CheckRowMajor());
  if (!format_.scale.empty())
    FMOE_RETURN_IF_ERROR(ReadScale(&matrix));
  if (!format_.second_scale.empty()) {
    FMOE_ASSIGN_OR_RETURN(const float stored, ReadScalar(format_.second_scale));
    matrix.tensor_scale = (format_.reciprocal ? 1.0F / stored : stored) / format_.second_scale_divisor;
  }
  if (!format_.zero_point.empty())
    FMOE_RETURN_IF_ERROR(ReadZeroPoints(&matrix));
  if (!format_.group_index.empty())
    FMOE_RETURN_IF_ERROR(ReadGroupIndex(&matrix));
  if (!format_.input_scale.empty() &&
      (!format_.input_scale_optional || store_.Has(NameOf(format_.input_scale)))) {
    FMOE_ASSIGN_OR_RETURN(const float stored, ReadScalar(format_.input_scale));
    matrix.input_tensor_scale = format_.reciprocal ? 1.0F / stored : stored;
  }
  if (!format_.pre_quant_scale.empty() && store_.Has(NameOf(format_.pre_quant_scale))) {
    const std::string name = NameOf(format_.pre_quant_scale);
    FMOE_ASSIGN_OR_RETURN(const Tensor stored, LoadRole(format_.pre_quant_scale));
    FMOE_ASSIGN_OR_RETURN(matrix.pre_quant_scale, ToF32(stored));
    if (!(stored.shape() == Shape{cols_}))
      return Wrong(name, stored, fmt::format("[{}]", cols_));
  }
  FMOE_RETURN_IF_ERROR(ReadBias(&matrix));
  if (Status status = ValidateCanonical(matrix); !status.ok())
    return BlameField(std::move(status));
  return matrix;
}

}  // namespace

Result<CanonicalMatrix> ReadMatrix(const TensorStore& store, const LinearFormat& format,
                                   const MatrixPlace& place, int64_t rows, int64_t cols) {
  return Reader(store, format, place, rows, cols).Read();
}

Result<Tensor> ToF32(const Tensor& tensor) {
  if (tensor.dtype() == DType::kF32 && tensor.view().dense())
    return tensor;
  if (!IsFloat(tensor.dtype())) {
    return Status::BadInput(fmt::format("{}; a float type is needed", DTypeName(tensor.dtype())));
  }
  FMOE_ASSIGN_OR_RETURN(Tensor out, Tensor::Allocate(DType::kF32, tensor.shape()));
  const TensorView& view = tensor.view();
  auto* to = out.mutable_view().as<float>();
  if (view.rank() == 2) {
    for (int64_t r = 0; r < view.dim(0); ++r) {
      DecodeRow(view.dtype(), view.data() + r * view.stride_bytes(0), 0, view.dim(1), to + r * view.dim(1));
    }
  } else {
    DecodeRow(view.dtype(), view.data(), 0, view.count(), to);
  }
  return out;
}

}  // namespace fusedmoe::checkpoint
