#include "capi/handles.hpp"

#include <fmt/format.h>
#include <fusedmoe/version.hpp>

namespace fusedmoe::capi {
namespace {

/// The last failure of a thread, with its one-line text.
struct LastError {
  Status status;
  std::string text;
  fmoe_error shown{FMOE_OK, "", "", "", "", ""};
};

LastError& OfThisThread() {
  thread_local LastError error;
  return error;
}

// The numbers of the C header are those of the tables here.
#define FMOE_CAPI_SAME_DTYPE(c_name, id) \
  static_assert(static_cast<int>(c_name) == static_cast<int>(DType::id))
FMOE_CAPI_SAME_DTYPE(FMOE_BOOL, kBool);
FMOE_CAPI_SAME_DTYPE(FMOE_F4_E2M1, kF4E2M1);
FMOE_CAPI_SAME_DTYPE(FMOE_F6_E2M3, kF6E2M3);
FMOE_CAPI_SAME_DTYPE(FMOE_F6_E3M2, kF6E3M2);
FMOE_CAPI_SAME_DTYPE(FMOE_U8, kU8);
FMOE_CAPI_SAME_DTYPE(FMOE_I8, kI8);
FMOE_CAPI_SAME_DTYPE(FMOE_F8_E5M2, kF8E5M2);
FMOE_CAPI_SAME_DTYPE(FMOE_F8_E4M3, kF8E4M3);
FMOE_CAPI_SAME_DTYPE(FMOE_F8_E8M0, kF8E8M0);
FMOE_CAPI_SAME_DTYPE(FMOE_F8_E4M3_FNUZ, kF8E4M3Fnuz);
FMOE_CAPI_SAME_DTYPE(FMOE_F8_E5M2_FNUZ, kF8E5M2Fnuz);
FMOE_CAPI_SAME_DTYPE(FMOE_I16, kI16);
FMOE_CAPI_SAME_DTYPE(FMOE_U16, kU16);
FMOE_CAPI_SAME_DTYPE(FMOE_F16, kF16);
FMOE_CAPI_SAME_DTYPE(FMOE_BF16, kBF16);
FMOE_CAPI_SAME_DTYPE(FMOE_I32, kI32);
FMOE_CAPI_SAME_DTYPE(FMOE_U32, kU32);
FMOE_CAPI_SAME_DTYPE(FMOE_F32, kF32);
FMOE_CAPI_SAME_DTYPE(FMOE_C64, kC64);
FMOE_CAPI_SAME_DTYPE(FMOE_F64, kF64);
FMOE_CAPI_SAME_DTYPE(FMOE_I64, kI64);
FMOE_CAPI_SAME_DTYPE(FMOE_U64, kU64);
FMOE_CAPI_SAME_DTYPE(FMOE_U4, kU4);
FMOE_CAPI_SAME_DTYPE(FMOE_I4, kI4);
#undef FMOE_CAPI_SAME_DTYPE
constexpr int kNumDTypes = static_cast<int>(FMOE_I4) + 1;

static_assert(FMOE_MAX_RANK == kMaxRank);
static_assert(static_cast<int>(FMOE_NO) == static_cast<int>(StatusCode::kNo));
static_assert(static_cast<int>(FMOE_USAGE) == static_cast<int>(StatusCode::kUsage));
static_assert(static_cast<int>(FMOE_BAD_INPUT) == static_cast<int>(StatusCode::kBadInput));
static_assert(static_cast<int>(FMOE_UNSUPPORTED) == static_cast<int>(StatusCode::kUnsupported));
static_assert(static_cast<int>(FMOE_SYSTEM) == static_cast<int>(StatusCode::kSystem));

bool Overflows(int64_t a, int64_t b) {
  int64_t product = 0;
  return __builtin_mul_overflow(a, b, &product);
}

/// Whether bytes and strides of a dense tensor of that shape fit into 64 bits. Beside an extent of 0 strides
/// are as long as beside 1.
bool Fits(std::span<const int64_t> shape) {
  int64_t bits = 64;  // of an element, at most
  for (const int64_t extent : shape) {
    if (Overflows(bits, std::max<int64_t>(extent, 1))) {
      return false;
    }
    bits *= std::max<int64_t>(extent, 1);
  }
  return true;
}

template <typename Byte>
Result<BasicTensorView<Byte>> ViewOf(const fmoe_tensor& tensor, std::string_view name) {
  // Rows of none often come without an address, and are rows nevertheless.
  if (tensor.data == nullptr && (tensor.rank != 2 || tensor.shape[0] != 0 || tensor.shape[1] == 0)) {
    return BasicTensorView<Byte>();
  }
  FMOE_ASSIGN_OR_RETURN(const DType dtype, ToDType(tensor.dtype, name));
  if (tensor.rank < 0 || tensor.rank > kMaxRank) {
    return Status::Usage(fmt::format("{}.rank is {}, ranks are 0..{}", name, tensor.rank, kMaxRank));
  }
  const auto rank = static_cast<size_t>(tensor.rank);
  bool dense = true;
  for (size_t axis = 0; axis < rank; ++axis) {
    if (tensor.shape[axis] < 0) {
      return Status::Usage(
          fmt::format("{}.shape[{}] is {}, it must not be negative", name, axis, tensor.shape[axis]));
    }
    dense = dense && (axis + 1 == rank || tensor.stride_bytes[axis] == 0);
    if (axis + 1 < rank && Overflows(tensor.shape[axis], tensor.stride_bytes[axis])) {
      return Status::Usage(fmt::format("{}.stride_bytes[{}] is {}: {} steps of it do not fit into 64 bits",
                                       name, axis, tensor.stride_bytes[axis], tensor.shape[axis]));
    }
  }
  const std::span<const int64_t> shape(tensor.shape, rank);
  if (!Fits(shape)) {
    return Status::Usage(
        fmt::format("{}.shape {} has more bits than 64 bits can count", name, Shape(shape).ToString()));
  }
  BasicTensorView<Byte> view(static_cast<Byte*>(tensor.data), dtype, Shape(shape));
  for (size_t axis = 0; !dense && axis + 1 < rank; ++axis) {
    view.set_stride_bytes(static_cast<int>(axis), tensor.stride_bytes[axis]);
  }
  return view;
}

}  // namespace

Result<DType> ToDType(const fmoe_dtype& dtype, std::string_view name) {
  int32_t number = 0;
  static_assert(sizeof(dtype) == sizeof(number));
  std::memcpy(&number, &dtype, sizeof(number));  // as an enumeration other numbers may not even be read
  if (number < 0 || number >= kNumDTypes) {
    return Status::Usage(fmt::format("{}.dtype is {}, dtypes are 0..{}", name, number, kNumDTypes - 1));
  }
  return static_cast<DType>(number);
}

fmoe_code Report(const Status& status) {
  if (status.ok()) {
    return FMOE_OK;
  }
  LastError& last = OfThisThread();
  last.text = status.ToString();  // may throw, and `shown` points into `status`
  last.status = status;
  last.shown = {static_cast<fmoe_code>(status.code()), last.text.c_str(),
                last.status.message().c_str(),         last.status.file().c_str(),
                last.status.tensor().c_str(),          last.status.hint().c_str()};
  return last.shown.code;
}

fmoe_code ReportException(const char* what) noexcept {
  try {
    return Report(Status::System(what));
  } catch (const std::bad_alloc&) {
    OfThisThread().shown = {FMOE_SYSTEM, "out of memory", "out of memory", "", "", ""};
    return FMOE_SYSTEM;
  }
}

Status NotNull(const void* pointer, std::string_view name) {
  return pointer != nullptr ? Status::Ok() : Status::Usage(fmt::format("{} is null", name));
}

Executor ToExecutor(const fmoe_executor* executor) {
  return executor == nullptr
             ? Executor{}
             : Executor{executor->self, executor->num_threads, executor->parallel, executor->stream};
}

Result<TensorView> ToView(const fmoe_tensor& tensor, std::string_view name) {
  return ViewOf<const std::byte>(tensor, name);
}

Result<MutableTensorView> ToMutableView(const fmoe_tensor& tensor, std::string_view name) {
  return ViewOf<std::byte>(tensor, name);
}

fmoe_tensor FromView(const TensorView& view) {
  fmoe_tensor tensor{};
  tensor.data = const_cast<std::byte*>(view.data());
  tensor.dtype = static_cast<fmoe_dtype>(view.dtype());
  tensor.rank = view.rank();
  for (int axis = 0; axis < view.rank(); ++axis) {
    tensor.shape[axis] = view.dim(axis);
    tensor.stride_bytes[axis] = axis + 1 < view.rank() ? view.stride_bytes(axis) : 0;
  }
  return tensor;
}

Result<Tensor> ToTensor(const fmoe_tensor& tensor, std::string_view name, std::shared_ptr<const void> owner) {
  FMOE_ASSIGN_OR_RETURN(const TensorView view, ToView(tensor, name));
  return view.empty() ? Tensor() : Tensor::Borrow(view, std::move(owner));
}

}  // namespace fusedmoe::capi

using namespace fusedmoe;
using namespace fusedmoe::capi;

const fmoe_error* fmoe_last_error() {
  return &OfThisThread().shown;
}

const char* fmoe_version() {
  return FUSEDMOE_VERSION_STRING;
}

int32_t fmoe_abi_version() {
  return FMOE_ABI_VERSION;
}

fmoe_code fmoe_thread_pool_create(int32_t num_threads, fmoe_thread_pool** pool) {
  return Make(pool, "pool", [&](fmoe_thread_pool& made) -> Status {
    FMOE_ASSIGN_OR_RETURN(made.pool, ThreadPool::Create(num_threads));
    return Status::Ok();
  });
}

void fmoe_thread_pool_release(fmoe_thread_pool* pool) {
  delete pool;
}

fmoe_executor fmoe_thread_pool_executor(const fmoe_thread_pool* pool) {
  const Executor executor = pool == nullptr ? Executor{} : pool->pool->executor();
  return {executor.self, executor.num_threads, executor.parallel, executor.stream};
}

fmoe_code fmoe_communicator_mpi(const char* module, double deadline_seconds,
                                fmoe_communicator** communicator) {
  return Make(communicator, "communicator", [&](fmoe_communicator& made) -> Status {
    FMOE_RETURN_IF_ERROR(NotNull(module, "module"));
    CommunicatorOptions options;
    options.deadline_seconds = deadline_seconds;
    FMOE_ASSIGN_OR_RETURN(made.communicator, MpiCommunicator(module, options));
    return Status::Ok();
  });
}

fmoe_code fmoe_communicator_nccl(const fmoe_communicator* host, const char* library, double deadline_seconds,
                                 int64_t card, void* adopt, fmoe_communicator** communicator) {
  return Make(communicator, "communicator", [&](fmoe_communicator& made) -> Status {
    FMOE_RETURN_IF_ERROR(NotNull(host, "host"));
    NcclOptions options;
    options.library = library == nullptr ? "" : library;
    options.deadline_seconds = deadline_seconds;
    options.card = card;
    options.adopt = adopt;
    FMOE_ASSIGN_OR_RETURN(made.communicator, NcclCommunicator(host->communicator, options));
    return Status::Ok();
  });
}

fmoe_code fmoe_communicator_finish(const fmoe_communicator* communicator, void* stream) {
  return Guarded([&]() -> Status {
    FMOE_RETURN_IF_ERROR(NotNull(communicator, "communicator"));
    return communicator->communicator->Finish(stream);
  });
}

int64_t fmoe_communicator_rank(const fmoe_communicator* communicator) {
  return communicator == nullptr ? 0 : communicator->communicator->rank();
}

int64_t fmoe_communicator_size(const fmoe_communicator* communicator) {
  return communicator == nullptr ? 1 : communicator->communicator->size();
}

void fmoe_communicator_release(fmoe_communicator* communicator) {
  delete communicator;
}
