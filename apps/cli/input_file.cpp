#include "input_file.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

#include <fmt/format.h>

#include "describe.hpp"

namespace fusedmoe::cli {
namespace {

/// A name that is misspelt would else be passed over, and another router would decide in silence.
Status CheckNames(const SafetensorsFile& file) {
  const std::vector<std::string> known = {"hidden_states", "router_logits", "topk_ids",
                                          "topk_weights",  "input_ids",     "token_ids"};
  for (const NamedTensor& entry : file.tensors) {
    const std::string& name = entry.name;
    if (std::find(known.begin(), known.end(), name) == known.end() && !name.starts_with("expected_")) {
      return Status::BadInput(fmt::format("no input has this name, the names are {}", Join(known)))
          .WithTensor(name)
          .WithHint("rename it or leave it out; what a test expects may stand there as expected_...");
    }
  }
  return Status::Ok();
}

}  // namespace

Result<InputFile> InputFile::Read(const std::string& path, const MoeConfig& config) {
  InputFile input;
  FMOE_ASSIGN_OR_RETURN(input.file_, ReadSafetensors(path));
  const Status status = input.Bind(config);
  if (!status.ok()) {
    return Status(status).WithFile(path);
  }
  return input;
}

Status InputFile::Bind(const MoeConfig& config) {
  FMOE_RETURN_IF_ERROR(CheckNames(file_));
  const Tensor* hidden = file_.Find("hidden_states");
  if (hidden == nullptr) {
    return Status::BadInput("the file has no hidden_states [tokens, hidden]").WithTensor("hidden_states");
  }
  const std::initializer_list<DType> floats = {DType::kBF16, DType::kF16, DType::kF32};
  const std::initializer_list<DType> ids = {DType::kI32, DType::kI64};
  const int64_t num_tokens = hidden->shape().rank() == 2 ? hidden->dim(0) : 0;
  if (num_tokens < 1) {
    return Status::BadInput(fmt::format("shape {} has no rows; [tokens, {}] is required",
                                        hidden->shape().ToString(), config.hidden))
        .WithTensor("hidden_states");
  }
  FMOE_RETURN_IF_ERROR(Take("hidden_states", {num_tokens, config.hidden}, floats, inputs_.hidden));
  FMOE_RETURN_IF_ERROR(
      Take("router_logits", {num_tokens, config.num_experts}, floats, inputs_.router_logits));
  FMOE_RETURN_IF_ERROR(Take("topk_ids", {num_tokens, config.top_k()}, ids, inputs_.topk_ids));
  FMOE_RETURN_IF_ERROR(
      Take("topk_weights", {num_tokens, config.top_k()}, {DType::kF32}, inputs_.topk_weights));
  // Models call them input_ids, the interfaces of this library token_ids.
  if (file_.Find("input_ids") != nullptr && file_.Find("token_ids") != nullptr) {
    return Status::BadInput(
               "input_ids and token_ids are two names of one input; one of them must be left out")
        .WithTensor("token_ids");
  }
  FMOE_RETURN_IF_ERROR(Take("input_ids", {num_tokens}, ids, inputs_.token_ids));
  FMOE_RETURN_IF_ERROR(Take("token_ids", {num_tokens}, ids, inputs_.token_ids));
  if (inputs_.topk_ids.empty() != inputs_.topk_weights.empty()) {
    return Status::BadInput("topk_ids and topk_weights belong together; only one is there")
        .WithTensor(inputs_.topk_ids.empty() ? "topk_ids" : "topk_weights");
  }
  if (!inputs_.topk_ids.empty() && !inputs_.router_logits.empty()) {
    return Status::BadInput(
               "router_logits and topk_ids both say where tokens go; one of them must be left out")
        .WithTensor("router_logits");
  }
  return Status::Ok();
}

uint64_t InputFile::Digest() const {
  uint64_t hash = 0xcbf29ce484222325ULL;
  const auto mix = [&](uint64_t word) { hash = std::rotl(hash ^ word, 29) * 0x9e3779b185ebca87ULL; };
  for (const TensorView* tensor : {&inputs_.hidden, &inputs_.router_logits, &inputs_.topk_ids,
                                   &inputs_.topk_weights, &inputs_.token_ids}) {
    const int64_t bytes = tensor->empty() ? 0 : tensor->total_bytes();
    mix(static_cast<uint64_t>(bytes));
    for (int64_t begin = 0; begin < bytes; begin += 8) {
      uint64_t word = 0;
      std::memcpy(&word, tensor->data() + begin, static_cast<size_t>(std::min<int64_t>(8, bytes - begin)));
      mix(word);
    }
  }
  return hash;
}

Status InputFile::Take(std::string_view name, const Shape& shape, std::initializer_list<DType> dtypes,
                       TensorView& out) const {
  const Tensor* tensor = file_.Find(name);
  if (tensor == nullptr) {
    return Status::Ok();
  }
  std::vector<std::string> names;
  for (const DType dtype : dtypes) {
    names.emplace_back(DTypeName(dtype));
  }
  if (!(tensor->shape() == shape) ||
      std::find(dtypes.begin(), dtypes.end(), tensor->dtype()) == dtypes.end()) {
    return Status::BadInput(fmt::format("is {} {}, the layer needs {} of {}", DTypeName(tensor->dtype()),
                                        tensor->shape().ToString(), shape.ToString(), Join(names)))
        .WithTensor(name);
  }
  out = tensor->view();
  return Status::Ok();
}

}  // namespace fusedmoe::cli
