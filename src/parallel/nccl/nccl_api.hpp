#pragma once

#include <climits>
#include <cstddef>
#include <memory>
#include <string>

#include <fusedmoe/status.hpp>

/// What this library calls of NCCL, declared here: host functions and types that have been the same since
/// NCCL 2.18 (ncclCommSplit). Nothing of NCCL is needed to build.
namespace fusedmoe::nccl {

inline constexpr int kOldestVersion = 21800;  ///< 2.18.0, as ncclGetVersion counts

inline constexpr int kSuccess = 0;
inline constexpr int kInProgress = 7;
inline constexpr int kUint8 = 1;  ///< ncclDataType_t: rows travel as bytes

struct UniqueId {
  char bytes[128] = {};
};

using Comm = void*;

/// ncclConfig_t as of 2.18. Later releases have more behind it, which they fill in by `size` and `version`.
struct Config {
  size_t size = sizeof(Config);
  unsigned int magic = 0xcafebeef;
  unsigned int version = kOldestVersion;
  int blocking = INT_MIN;  ///< INT_MIN: as NCCL likes
  int cga_cluster_size = INT_MIN;
  int min_ctas = INT_MIN;
  int max_ctas = INT_MIN;
  const char* net_name = nullptr;
  int split_share = INT_MIN;
};

/// Every function once: member, symbol, type.
#define FMOE_NCCL_FUNCTIONS(X)                                                        \
  X(get_version, "ncclGetVersion", int (*)(int*))                                     \
  X(get_unique_id, "ncclGetUniqueId", int (*)(UniqueId*))                             \
  X(init_rank, "ncclCommInitRankConfig", int (*)(Comm*, int, UniqueId, int, Config*)) \
  X(split, "ncclCommSplit", int (*)(Comm, int, int, Comm*, Config*))                  \
  X(destroy, "ncclCommDestroy", int (*)(Comm))                                        \
  X(abort, "ncclCommAbort", int (*)(Comm))                                            \
  X(async_error, "ncclCommGetAsyncError", int (*)(Comm, int*))                        \
  X(count, "ncclCommCount", int (*)(Comm, int*))                                      \
  X(user_rank, "ncclCommUserRank", int (*)(Comm, int*))                               \
  X(device, "ncclCommCuDevice", int (*)(Comm, int*))                                  \
  X(send, "ncclSend", int (*)(const void*, size_t, int, int, Comm, void*))            \
  X(receive, "ncclRecv", int (*)(void*, size_t, int, int, Comm, void*))               \
  X(group_start, "ncclGroupStart", int (*)())                                         \
  X(group_end, "ncclGroupEnd", int (*)())                                             \
  X(error_text, "ncclGetErrorString", const char* (*)(int))                           \
  X(last_error, "ncclGetLastError", const char* (*)(Comm))

struct Api {
#define FMOE_NCCL_TYPE(member, symbol, ...) using member##_function = __VA_ARGS__;
  FMOE_NCCL_FUNCTIONS(FMOE_NCCL_TYPE)
#undef FMOE_NCCL_TYPE
#define FMOE_NCCL_MEMBER(member, symbol, ...) member##_function member = nullptr;
  FMOE_NCCL_FUNCTIONS(FMOE_NCCL_MEMBER)
#undef FMOE_NCCL_MEMBER
  std::string file;
  int version = 0;

  std::string VersionText() const;
  /// What `error` means, with the last words of NCCL itself.
  std::string Describe(int error, Comm comm) const;
};

/// Opens NCCL, which then stays loaded: it leaves threads behind. `library` as in NcclOptions. kUnsupported
/// where it cannot be opened, lacks a function, or is older than kOldestVersion.
Result<std::shared_ptr<const Api>> Load(const std::string& library);

}  // namespace fusedmoe::nccl
