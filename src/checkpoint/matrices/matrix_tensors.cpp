#include "checkpoint/matrices/matrix_tensors.hpp"

#include <cmath>
#include <utility>

#include <fmt/format.h>

#include "checkpoint/matrices/unpack.hpp"
#include "core/checked_math.hpp"
#include "numerics/element_types.hpp"
#include "numerics/rows.hpp"
#include "quant/packing.hpp"

namespace fusedmoe::checkpoint {
namespace {

// TensorRT-LLM's W4AFP8 leaves weights their names and calls the scales of their inputs by DeepSeek's own:
// "experts.0.w1.input_scale" of "experts.0.gate_proj".
std::string InputScaleByNumber(const TensorStore& store, const std::string& base, const std::string& plain) {
  constexpr std::pair<std::string_view, std::string_view> kNames[] = {
      {"gate_proj", "w1"}, {"down_proj", "w2"}, {"up_proj", "w3"}};
  for (const auto& [name, number] : kNames) {
    if (base.ends_with(name)) {
      std::string other = fmt::format("{}{}.input_scale", base.substr(0, base.size() - name.size()), number);
      return store.Has(other) ? other : plain;
    }
  }
  return plain;
}

}  // namespace

std::string RoleName(const TensorStore& store, const MatrixPlace& place, std::string_view suffix) {
  const std::string plain = place.base + std::string(suffix);
  if (place.weight_suffix == ".weight") {
    return suffix == ".input_scale" && !store.Has(plain) ? InputScaleByNumber(store, place.base, plain)
                                                         : plain;
  }
  // Parameters of fused modules are tensors themselves: "gate_up_proj", "gate_up_proj_weight_scale"
  // (ModelOpt), "gate_up_proj_scale_inv" (transformers), "gate_up_proj_scales" (gpt-oss).
  if (suffix == ".weight") {
    return place.base;
  }
  std::string_view word = suffix;
  if (word.starts_with('.') || word.starts_with('_')) {
    word.remove_prefix(1);
  }
  const std::string with_underscore = place.base + "_" + std::string(word);
  if (store.Has(with_underscore)) {
    return with_underscore;
  }
  if (word.starts_with("weight_")) {
    const std::string shorter = place.base + "_" + std::string(word.substr(7));
    if (store.Has(shorter)) {
      return shorter;
    }
  }
  return store.Has(plain) ? plain : with_underscore;
}

Status MatrixTensors::Wrong(const std::string& name, const Tensor& tensor, std::string_view wanted) const {
  return store.Blame(Status::BadInput(fmt::format("{} {}; {} is needed", DTypeName(tensor.dtype()),
                                                  tensor.shape().ToString(), wanted)),
                     name);
}

namespace {

/// make(), or what it gave for the other part.
template <typename Make>
Result<Tensor> Once(std::map<std::string, Tensor, std::less<>>& kept, const std::string& name, Make make) {
  if (const auto found = kept.find(name); found != kept.end()) {
    return found->second;
  }
  FMOE_ASSIGN_OR_RETURN(Tensor tensor, make());
  kept.emplace(name, tensor);
  return tensor;
}

// The tensor of this expert, or what all experts share.
Result<Tensor> LoadStored(const TensorStore& store, const MatrixPlace& place, const std::string& name,
                          BlockParts* beside) {
  if (place.item < 0) {
    return store.Load(name, beside);
  }
  const TensorInfo* info = store.Find(name);
  if (info == nullptr) {
    return store.Load(name);  // the error that names it
  }
  if (place.flattened) {
    const int64_t length = info->shape.rank() == 2 ? info->shape[0] : 0;
    if (length == 0 || length % place.num_items != 0) {
      return store.Blame(Status::BadInput(fmt::format("{}; rows for {} experts are needed",
                                                      info->shape.ToString(), place.num_items)),
                         name);
    }
    const int64_t each = length / place.num_items;
    return store.LoadRows(name, place.item * each, each, beside);
  }
  if (info->shape.rank() == 0 || (info->shape.rank() == 1 && info->shape[0] == 1 && place.num_items != 1)) {
    return store.Load(name);  // one number for all experts
  }
  if (info->shape[0] != place.num_items && info->shape[0] != place.num_items + place.spare_items) {
    return store.Blame(Status::BadInput(fmt::format("{}; the first dimension must be the {} experts",
                                                    info->shape.ToString(), place.num_items)),
                       name);
  }
  return store.LoadItem(name, place.item, beside);
}

}  // namespace

Result<Tensor> MatrixTensors::Load(std::string_view suffix) const {
  const std::string name = NameOf(suffix);
  const auto load = [&] { return LoadStored(store, place, name, beside); };
  return joined == nullptr || place.parts == 1 ? load() : Once(joined->stored, name, load);
}

Result<Tensor> MatrixTensors::Part(Tensor tensor, const std::string& name, int64_t block) const {
  if (tensor.shape().rank() != 2) {
    return Wrong(name, tensor, "a matrix");
  }
  if (place.in_out) {
    const auto transpose = [&] { return Transpose(tensor.view()); };
    FMOE_ASSIGN_OR_RETURN(tensor, joined == nullptr || place.parts == 1
                                      ? transpose()
                                      : Once(joined->transposed, name, transpose));
  }
  if (place.parts == 1) {
    return tensor;
  }
  const TensorView view = tensor.view();
  if (place.interleaved) {
    if (block != 1) {
      return tensor;  // blocks hold rows of both
    }
    if (view.dim(0) % 2 != 0) {
      return Wrong(name, tensor, "an even number of rows, alternating gate and up");
    }
    TensorView half(view.data() + place.part * view.stride_bytes(0), view.dtype(),
                    Shape{view.dim(0) / 2, view.dim(1)});
    half.set_stride_bytes(0, 2 * view.stride_bytes(0));
    return Tensor::Borrow(half, tensor.owner());
  }
  const int64_t first = place.part * rows / block;
  const int64_t count = CeilDiv((place.part + 1) * rows, block) - first;
  if (view.dim(0) != CeilDiv(2 * rows, block)) {
    return Wrong(name, tensor, fmt::format("{} rows", CeilDiv(2 * rows, block)));
  }
  return Tensor::Borrow(view.Rows(first, count), tensor.owner());
}

Result<float> MatrixTensors::LoadScale(std::string_view suffix) const {
  const std::string name = NameOf(suffix);
  FMOE_ASSIGN_OR_RETURN(Tensor stored, Load(suffix));
  // [E, 2], [E, 2, 1] (transformers): gate and up each have their own.
  const bool own = place.parts == 2 && stored.shape().count() == 2 && stored.dim(0) == 2;
  const DType found = stored.dtype();
  if ((!own && stored.shape().count() != 1) || !IsPlainFloat(found)) {
    return Wrong(name, stored, "one F32, BF16 or F16");
  }
  float values[2] = {0.0F, 0.0F};
  DecodeRow(found, stored.view().data(), 0, stored.shape().count(), values);
  const float value = values[own ? place.part : 0];
  if (!std::isfinite(value) || value <= 0.0F) {
    return store.Blame(Status::BadInput(fmt::format("the scale is {}; finite and > 0 is required", value)),
                       name);
  }
  return value;
}

Result<Tensor> ToF32(const Tensor& tensor) {
  if (tensor.dtype() == DType::kF32 && tensor.view().dense()) {
    return tensor;
  }
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

Status CheckFinite(const TensorStore& store, const Tensor& tensor, const std::string& name) {
  const TensorView view = tensor.view();
  std::vector<float> row(static_cast<size_t>(view.dim(view.shape().rank() - 1)));
  const auto width = static_cast<int64_t>(row.size());
  for (int64_t begin = 0; begin < view.count(); begin += width) {
    DecodeRow(view.dtype(), view.data(), begin, width, row.data());
    for (int64_t i = 0; i < width; ++i) {
      const float value = row[static_cast<size_t>(i)];
      if (!std::isfinite(value)) {
        return store.Blame(
            Status::BadInput(fmt::format("element {} is {}; finite is required", begin + i, value)), name);
      }
    }
  }
  return Status::Ok();
}

}  // namespace fusedmoe::checkpoint
