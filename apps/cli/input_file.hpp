#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

#include <fusedmoe/config.hpp>
#include <fusedmoe/layer.hpp>
#include <fusedmoe/safetensors.hpp>

namespace fusedmoe::cli {

/// The tensors of the input file that a forward takes, with the shapes and dtypes that the layer needs. Any
/// other tensor is kBadInput, but for those whose names begin with expected_.
class InputFile {
 public:
  static Result<InputFile> Read(const std::string& path, const MoeConfig& config);
  const MoeLayer::Inputs& tensors() const { return inputs_; }
  int64_t num_tokens() const { return inputs_.hidden.dim(0); }
  /// Of every byte that a forward takes: ranks that were given different files tell one another by it.
  uint64_t Digest() const;

 private:
  Status Bind(const MoeConfig& config);
  Status Take(std::string_view name, const Shape& shape, std::initializer_list<DType> dtypes,
              TensorView& out) const;

  SafetensorsFile file_;
  MoeLayer::Inputs inputs_;
};

}  // namespace fusedmoe::cli
