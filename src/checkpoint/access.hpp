#pragma once

#include <cstdint>
#include <memory>

#include <fusedmoe/checkpoint.hpp>

#include "checkpoint/files/tensor_store.hpp"
#include "checkpoint/layers/model_config.hpp"
#include "checkpoint/matrices/expert_loader.hpp"

namespace fusedmoe::checkpoint {

/// The inside of an opened checkpoint, for jobs that judge or rewrite one: which tensor is which.
struct Access {
  static Result<std::shared_ptr<const LayerContext>> Context(const Checkpoint& checkpoint, int64_t layer);
  static const TensorStore& Store(const Checkpoint& checkpoint);
  static const ModelConfig& Config(const Checkpoint& checkpoint);
};

}  // namespace fusedmoe::checkpoint
