#include "parallel/nccl/nccl_api.hpp"

#include <dlfcn.h>

#include <fmt/format.h>
#include <fusedmoe/communicator.hpp>

namespace fusedmoe::nccl {
namespace {

constexpr const char* kLibrary = "libnccl.so.2";

std::string Text(int version) {
  return fmt::format("{}.{}.{}", version / 10000, version % 10000 / 100, version % 100);
}

}  // namespace

std::string Api::VersionText() const {
  return Text(version);
}

std::string Api::Describe(int error, Comm comm) const {
  const char* const text = error_text(error);
  const char* const last = last_error(comm);
  const std::string_view more = last == nullptr ? "" : last;
  return fmt::format("NCCL {} says {}{}{}", VersionText(), text == nullptr ? "?" : text,
                     more.empty() ? "" : ": ", more);
}

Result<std::shared_ptr<const Api>> Load(const std::string& library) {
  const char* const name = library.empty() ? kLibrary : library.c_str();
  void* const module = dlopen(name, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (module == nullptr) {
    const char* const reason = dlerror();
    return Status::Unsupported(fmt::format("NCCL cannot be loaded: {}; {} or later is required",
                                           reason == nullptr ? name : reason, Text(kOldestVersion)))
        .WithHint("--nccl or LD_LIBRARY_PATH says where it is; PyTorch has one in nvidia/nccl/lib");
  }
  auto api = std::make_shared<Api>();
#define FMOE_NCCL_LOAD(member, symbol, ...)                                                            \
  api->member = reinterpret_cast<Api::member##_function>(dlsym(module, symbol));                       \
  if (api->member == nullptr) {                                                                        \
    return Status::Unsupported(                                                                        \
        fmt::format("{} lacks {}; NCCL {} or later is required", name, symbol, Text(kOldestVersion))); \
  }
  FMOE_NCCL_FUNCTIONS(FMOE_NCCL_LOAD)
#undef FMOE_NCCL_LOAD
  Dl_info where{};
  const bool known = dladdr(reinterpret_cast<void*>(api->get_version), &where) != 0;
  api->file = known && where.dli_fname != nullptr ? where.dli_fname : name;
  if (const int error = api->get_version(&api->version); error != kSuccess) {
    return Status::Unsupported(fmt::format("{} does not tell its version: error {}", api->file, error));
  }
  if (api->version < kOldestVersion) {
    return Status::Unsupported(fmt::format("{} is NCCL {}; {} or later is required", api->file,
                                           api->VersionText(), Text(kOldestVersion)));
  }
  return std::shared_ptr<const Api>(std::move(api));
}

}  // namespace fusedmoe::nccl

namespace fusedmoe {

Result<NcclLibrary> FindNccl(const std::string& library) {
  FMOE_ASSIGN_OR_RETURN(const std::shared_ptr<const nccl::Api> api, nccl::Load(library));
  return NcclLibrary{api->file, api->VersionText()};
}

}  // namespace fusedmoe
