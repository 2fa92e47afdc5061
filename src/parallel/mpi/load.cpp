#include <dlfcn.h>

#include <fmt/format.h>
#include <fusedmoe/communicator.hpp>

#include "parallel/mpi/engine_communicator.hpp"
#include "parallel/pause.hpp"

namespace fusedmoe {

Result<std::shared_ptr<Communicator>> MpiCommunicator(const std::string& plugin,
                                                      const CommunicatorOptions& options) {
  FMOE_RETURN_IF_ERROR(CheckDeadline(options.deadline_seconds));
  // RTLD_GLOBAL: Open MPI opens components of its own, which look for its symbols among the global ones.
  void* module = dlopen(plugin.c_str(), RTLD_NOW | RTLD_GLOBAL);
  if (module == nullptr) {
    const char* reason = dlerror();
    return Status::Unsupported(fmt::format("the MPI module cannot be loaded: {}", reason ? reason : plugin))
        .WithHint("it is built when MPI is found: apt-get install libopenmpi-dev openmpi-bin");
  }
  void* symbol = dlsym(module, "fmoe_rank_engine_open");
  if (symbol == nullptr) {
    dlclose(module);
    return Status::Unsupported(fmt::format("{} is no rank engine: it lacks fmoe_rank_engine_open", plugin));
  }
  fmoe_rank_engine engine{};
  char text[512] = "";
  if (reinterpret_cast<fmoe_rank_engine_open_function>(symbol)(&engine, text, sizeof(text)) != 0) {
    return Status::System(fmt::format("MPI: {}", text));
  }
  if (engine.abi_version != FMOE_RANK_ENGINE_ABI) {
    return Status::Unsupported(fmt::format("{} has engine interface {}, this library {}", plugin,
                                           engine.abi_version, FMOE_RANK_ENGINE_ABI));
  }
  // The module stays loaded: MPI leaves threads and exit handlers behind.
  return std::shared_ptr<Communicator>(new EngineCommunicator("mpi", engine, options));
}

}  // namespace fusedmoe
