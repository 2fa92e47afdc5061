#include <limits>

#include <fmt/format.h>

#include "capi/handles.hpp"

namespace fusedmoe::capi {
namespace {

/// What the routing callback of the forward under way on this thread has answered.
int32_t& CallbackCode() {
  thread_local int32_t code = 0;
  return code;
}

}  // namespace

// The callback of the C++ interface has no way to fail: ids that no layer has end the forward, on all ranks.
void RefuseRouting(int32_t code, int64_t num_ids, int32_t* ids) {
  CallbackCode() = code;
  std::fill(ids, ids + num_ids, std::numeric_limits<int32_t>::min());
}

Status AfterRouting(Status status) {
  const int32_t code = std::exchange(CallbackCode(), 0);
  return code == 0 ? status
                   : Status::BadInput(fmt::format("the caller's custom_routing returned {}, not 0", code));
}

}  // namespace fusedmoe::capi
