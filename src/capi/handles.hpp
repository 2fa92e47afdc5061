#pragma once

#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <string>
#include <utility>

#include <fusedmoe/fusedmoe.h>
#include <fusedmoe/checkpoint.hpp>
#include <fusedmoe/communicator.hpp>
#include <fusedmoe/executor.hpp>
#include <fusedmoe/layer.hpp>

/// What the handles of fusedmoe.h point at, and the way of failures through it.

struct fmoe_thread_pool {
  std::unique_ptr<fusedmoe::ThreadPool> pool;
};

struct fmoe_communicator {
  std::shared_ptr<fusedmoe::Communicator> communicator;
};

struct fmoe_checkpoint {
  std::shared_ptr<const fusedmoe::Checkpoint> checkpoint;
};

struct fmoe_layer {
  std::unique_ptr<fusedmoe::MoeLayer> layer;
  std::string plan, selection;
};

struct fmoe_workspace {
  fusedmoe::Workspace workspace;
};

namespace fusedmoe::capi {

/// Keeps `status` as the last error of this thread, where it is one; its code.
fmoe_code Report(const Status& status);

/// The code of f(), which returns a Status. What the standard library throws ends here.
template <typename F>
fmoe_code Guarded(F&& f) {
  try {
    return Report(f());
  } catch (const std::bad_alloc&) {
    return Report(Status::System("out of memory"));
  } catch (const std::exception& error) {
    return Report(Status::System(error.what()));
  }
}

/// Hands the value that f() finds to the caller as a handle; `*out` is null when there is none.
template <typename Handle, typename F>
fmoe_code Make(Handle** out, std::string_view name, F&& f) {
  if (out == nullptr) {
    return Report(Status::Usage(std::string(name) + " is null, it must say where the handle goes"));
  }
  *out = nullptr;
  return Guarded([&]() -> Status {
    auto handle = std::make_unique<Handle>();
    FMOE_RETURN_IF_ERROR(f(*handle));
    *out = handle.release();
    return Status::Ok();
  });
}

Status NotNull(const void* pointer, std::string_view name);

/// A struct of the caller as this library knows it: what the caller's header lacks keeps the value of `init`.
template <typename Struct>
Result<Struct> Whole(const Struct* given, void (*init)(Struct*), std::string_view name) {
  Struct whole;
  init(&whole);
  if (given != nullptr) {
    if (given->struct_size < sizeof(size_t) || given->struct_size > sizeof(Struct)) {
      return Status::Usage(std::string(name) + ".struct_size is " + std::to_string(given->struct_size) +
                           ", this library knows " + std::to_string(sizeof(Struct)) + " bytes")
          .WithHint("call " + std::string(name) + "_init; a program must not be newer than the library");
    }
    std::memcpy(&whole, given, given->struct_size);
    whole.struct_size = sizeof(Struct);
  }
  return whole;
}

Executor ToExecutor(const fmoe_executor* executor);
/// Empty where there is no data.
Result<TensorView> ToView(const fmoe_tensor& tensor, std::string_view name);
Result<MutableTensorView> ToMutableView(const fmoe_tensor& tensor, std::string_view name);
/// A tensor that keeps `owner` alive.
Result<Tensor> ToTensor(const fmoe_tensor& tensor, std::string_view name, std::shared_ptr<const void> owner);

Result<LayerOptions> ToOptions(const fmoe_layer_options* options);

/// A layer of the experts that the caller holds.
Result<std::unique_ptr<MoeLayer>> CreateLayer(const fmoe_layer_config* config,
                                              const fmoe_expert_source* experts, const LayerOptions& options);

}  // namespace fusedmoe::capi
