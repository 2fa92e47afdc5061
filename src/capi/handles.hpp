#pragma once

#include <algorithm>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <string>
#include <string_view>

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
  std::string plan, plan_json, selection;
};

struct fmoe_workspace {
  fusedmoe::Workspace workspace;
};

namespace fusedmoe::capi {

/// Keeps `status` as the last error of this thread, where it is one; its code.
fmoe_code Report(const Status& status);

/// The same for an exception. Where there is no memory for its text, the last error is that.
fmoe_code ReportException(const char* what) noexcept;

/// The code of f(), which returns a Status. What the standard library or a callback of the caller's threw
/// ends here.
template <typename F>
fmoe_code Guarded(F&& f) noexcept {
  try {
    return Report(f());
  } catch (const std::bad_alloc&) {
    return ReportException("out of memory");
  } catch (const std::exception& error) {
    return ReportException(error.what());
  } catch (...) {
    return ReportException("a callback threw what is no std::exception");
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

/// kUsage where the caller's struct is not one that this library knows.
inline Status CheckStructSize(size_t given, size_t known, std::string_view name) {
  if (given >= sizeof(size_t) && given <= known) {
    return Status::Ok();
  }
  return Status::Usage(std::string(name) + ".struct_size is " + std::to_string(given) +
                       ", this library knows " + std::to_string(known) + " bytes")
      .WithHint("call " + std::string(name) + "_init; a program must not be newer than the library");
}

/// As much of `from` as the caller's struct holds, which begins with its size.
template <typename Struct>
Status Show(const Struct& from, Struct& out, std::string_view name) {
  const size_t size = out.struct_size;
  FMOE_RETURN_IF_ERROR(CheckStructSize(size, sizeof(Struct), name));
  std::memcpy(&out, &from, size);
  out.struct_size = size;
  return Status::Ok();
}

/// The first `size` bytes of `defaults`: all that the caller's header knows. It may be older than this
/// library, and its struct shorter.
template <typename Struct>
void Init(Struct defaults, Struct* out, size_t size) {
  if (out != nullptr && size >= sizeof(size_t)) {
    defaults.struct_size = size;
    std::memcpy(out, &defaults, std::min(size, sizeof(Struct)));
  }
}

/// `text`, cut where the field ends.
template <size_t kSize>
void CopyText(std::string_view text, char (&out)[kSize]) {
  const size_t count = std::min(text.size(), kSize - 1);
  std::memcpy(out, text.data(), count);
  out[count] = '\0';
}

/// A struct of the caller as this library knows it: what the caller's header lacks keeps the value of `init`.
template <typename Struct>
Result<Struct> Whole(const Struct* given, void (*init)(Struct*), std::string_view name) {
  Struct whole;
  init(&whole);
  if (given != nullptr) {
    FMOE_RETURN_IF_ERROR(CheckStructSize(given->struct_size, sizeof(Struct), name));
    std::memcpy(&whole, given, given->struct_size);
    whole.struct_size = sizeof(Struct);
  }
  return whole;
}

Executor ToExecutor(const fmoe_executor* executor);
/// kUsage for a number that is no dtype, which a caller in C may leave there.
Result<DType> ToDType(const fmoe_dtype& dtype, std::string_view name);
/// Empty where there is no data, and without a shape unless that says [0, columns].
Result<TensorView> ToView(const fmoe_tensor& tensor, std::string_view name);
Result<MutableTensorView> ToMutableView(const fmoe_tensor& tensor, std::string_view name);
/// A tensor that keeps `owner` alive.
Result<Tensor> ToTensor(const fmoe_tensor& tensor, std::string_view name, std::shared_ptr<const void> owner);

/// A tensor of the library for a callback of the caller's, which must not write to it.
fmoe_tensor FromView(const TensorView& view);

/// A routing callback has failed with `code`: `ids` become such that the forward refuses them.
void RefuseRouting(int32_t code, int64_t num_ids, int32_t* ids);
/// What a forward on this thread that ended with `status` reports: that its routing callback failed, if it
/// did.
Status AfterRouting(Status status);

Result<CheckpointOptions> ToCheckpointOptions(const fmoe_checkpoint_options* options);
Result<LayerOptions> ToOptions(const fmoe_layer_options* options);

/// What the caller says of a layer of its own experts, checked.
Result<MoeConfig> ToConfig(const fmoe_layer_config& from);
Result<RouterWeights> ToRouter(const fmoe_layer_config& from);
/// Held experts are those of one rank.
Status CheckOneRank(const LayerOptions& options);

/// A layer of the experts that the caller holds, one by one or stacked.
Result<std::unique_ptr<MoeLayer>> CreateLayer(const fmoe_layer_config* config,
                                              const fmoe_expert_source* experts, const LayerOptions& options);
Result<std::unique_ptr<MoeLayer>> CreateLayer(const fmoe_layer_config* config,
                                              const fmoe_stacked_experts* experts,
                                              const LayerOptions& options);

}  // namespace fusedmoe::capi
