#include <fusedmoe/jobs/activation_stats.hpp>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>

#include <fmt/format.h>

#include <fusedmoe/safetensors.hpp>

#include "platform/file_lock.hpp"

namespace fusedmoe {
namespace {

constexpr std::string_view kPrefix = "layers.";

template <typename T>
Result<std::vector<T>> Column(const SafetensorsFile& file, const std::string& name, DType dtype) {
  const Tensor* tensor = file.Find(name);
  if (tensor == nullptr || tensor->dtype() != dtype || tensor->shape().rank() != 1 || tensor->dim(0) < 1) {
    return Status::BadInput(fmt::format("{} [experts] is needed, {}", DTypeName(dtype),
                                        tensor == nullptr ? "it is missing"
                                                          : std::string(DTypeName(tensor->dtype())) + " " +
                                                                tensor->shape().ToString() + " is there"))
        .WithTensor(name);
  }
  const T* values = tensor->view().as<T>();
  std::vector<T> column(values, values + tensor->dim(0));
  for (const T value : column) {
    if (!(value >= 0) || !std::isfinite(static_cast<double>(value))) {
      return Status::BadInput(fmt::format("{} is no statistic: finite and not negative is required", value))
          .WithTensor(name);
    }
  }
  return column;
}

template <typename T>
Result<NamedTensor> ToTensor(const std::string& name, DType dtype, const std::vector<T>& column) {
  FMOE_ASSIGN_OR_RETURN(Tensor tensor, Tensor::Allocate(dtype, {static_cast<int64_t>(column.size())}));
  std::memcpy(tensor.mutable_view().data(), column.data(), column.size() * sizeof(T));
  return NamedTensor{name, std::move(tensor)};
}

}  // namespace

std::string ActivationStatsSizes::ToString() const {
  return fmt::format("{} experts, hidden {}, intermediate {}", experts, hidden, intermediate);
}

Status ActivationStats::Merge(const ActivationStats& other) {
  for (const auto& [layer, from] : other.layers) {
    const auto [at, is_new] = layers.try_emplace(layer, from);
    if (is_new) {
      continue;
    }
    LayerActivationStats& to = at->second;
    for (size_t expert = 0; to.sizes() == from.sizes() && expert < to.tokens.size(); ++expert) {
      if (to.tokens[expert] > std::numeric_limits<int64_t>::max() - from.tokens[expert]) {
        return Status::BadInput(
            fmt::format("expert {} of layer {} has {} tokens; with {} more the count passes 64 "
                        "bits",
                        expert, layer, to.tokens[expert], from.tokens[expert]));
      }
    }
    if (to.sizes() != from.sizes()) {
      return Status::BadInput(fmt::format("the statistics of layer {} are of {}, those to add of {}", layer,
                                          to.sizes().ToString(), from.sizes().ToString()))
          .WithHint("one file holds the statistics of one model");
    }
    for (size_t expert = 0; expert < to.tokens.size(); ++expert) {
      to.gate_up_amax[expert] = std::max(to.gate_up_amax[expert], from.gate_up_amax[expert]);
      to.down_amax[expert] = std::max(to.down_amax[expert], from.down_amax[expert]);
      to.tokens[expert] += from.tokens[expert];
    }
  }
  return Status::Ok();
}

Result<ActivationStats> ReadActivationStats(const std::string& path) {
  FMOE_ASSIGN_OR_RETURN(const SafetensorsFile file, ReadSafetensors(path));
  ActivationStats stats;
  for (const NamedTensor& tensor : file.tensors) {
    constexpr std::string_view kSuffix = ".tokens";
    if (!tensor.name.starts_with(kPrefix) || !tensor.name.ends_with(kSuffix)) {
      continue;
    }
    const char* begin = tensor.name.data() + kPrefix.size();
    const char* end = tensor.name.data() + tensor.name.size() - kSuffix.size();
    int64_t layer = -1;
    if (std::from_chars(begin, end, layer).ptr != end || layer < 0) {
      return Status::BadInput("no layer number stands in the name").WithTensor(tensor.name).WithFile(path);
    }
    const std::string stem = fmt::format("{}{}.", kPrefix, layer);
    const auto read = [&]() -> Result<LayerActivationStats> {
      LayerActivationStats columns;
      FMOE_ASSIGN_OR_RETURN(columns.tokens, Column<int64_t>(file, stem + "tokens", DType::kI64));
      FMOE_ASSIGN_OR_RETURN(columns.gate_up_amax, Column<float>(file, stem + "gate_up_amax", DType::kF32));
      FMOE_ASSIGN_OR_RETURN(columns.down_amax, Column<float>(file, stem + "down_amax", DType::kF32));
      FMOE_ASSIGN_OR_RETURN(const std::vector<int64_t> sizes,
                            Column<int64_t>(file, stem + "sizes", DType::kI64));
      if (sizes.size() != 2) {
        return Status::BadInput(
                   fmt::format("has {} values; 2 (hidden, intermediate) are required", sizes.size()))
            .WithTensor(stem + "sizes");
      }
      columns.hidden = sizes[0], columns.intermediate = sizes[1];
      if (columns.gate_up_amax.size() != columns.tokens.size() ||
          columns.down_amax.size() != columns.tokens.size()) {
        return Status::BadInput(
                   fmt::format("tokens has {}, gate_up_amax {}, down_amax {} experts; all must be equal",
                               columns.tokens.size(), columns.gate_up_amax.size(), columns.down_amax.size()))
            .WithTensor(tensor.name);
      }
      return columns;
    };
    auto columns = read();
    if (!columns.ok()) {
      return std::move(columns).status().WithFile(path);
    }
    stats.layers.emplace(layer, *std::move(columns));
  }
  if (stats.layers.empty()) {
    return Status::BadInput("the file has no layers.N.tokens: it holds no activation statistics")
        .WithFile(path)
        .WithHint("fusedmoe calibrate writes them");
  }
  return stats;
}

Status WriteActivationStats(const std::string& path, const ActivationStats& stats) {
  std::vector<NamedTensor> tensors;
  for (const auto& [layer, columns] : stats.layers) {
    const std::string stem = fmt::format("{}{}.", kPrefix, layer);
    FMOE_ASSIGN_OR_RETURN(NamedTensor tokens, ToTensor(stem + "tokens", DType::kI64, columns.tokens));
    FMOE_ASSIGN_OR_RETURN(NamedTensor first,
                          ToTensor(stem + "gate_up_amax", DType::kF32, columns.gate_up_amax));
    FMOE_ASSIGN_OR_RETURN(NamedTensor second, ToTensor(stem + "down_amax", DType::kF32, columns.down_amax));
    const std::vector<int64_t> extents = {columns.hidden, columns.intermediate};
    FMOE_ASSIGN_OR_RETURN(NamedTensor sizes, ToTensor(stem + "sizes", DType::kI64, extents));
    for (NamedTensor* tensor : {&tokens, &first, &second, &sizes}) {
      tensors.push_back(std::move(*tensor));
    }
  }
  return WriteSafetensors(path, tensors, {{"format", "fusedmoe.activation_stats"}});
}

Result<ActivationStats> AddToActivationStats(const std::string& path, const ActivationStats& stats) {
  namespace fs = std::filesystem;
  const fs::path folder = fs::path(path).parent_path();
  FMOE_ASSIGN_OR_RETURN(const std::unique_ptr<platform::FileLock> lock,
                        platform::FileLock::WaitForFolder(folder.empty() ? "." : folder.string()));
  ActivationStats all;
  if (std::error_code ignored; fs::exists(path, ignored)) {
    FMOE_ASSIGN_OR_RETURN(all, ReadActivationStats(path));
  }
  if (Status merged = all.Merge(stats); !merged.ok()) {
    return std::move(merged).WithFile(path);
  }
  FMOE_RETURN_IF_ERROR(WriteActivationStats(path, all));
  return all;
}

}  // namespace fusedmoe
