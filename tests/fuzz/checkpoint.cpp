#include <fusedmoe/checkpoint.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <string_view>

#include "fuzz/visit_checkpoint.hpp"
#include "support/temporary_directory.hpp"

/// A checkpoint of any bytes: config.json, a zero byte, model.safetensors. An error, or a description of its
/// layers and experts that load or say why not.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const fusedmoe::test::TemporaryDirectory folder;
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  const size_t split = std::min(bytes.find('\0'), bytes.size());
  folder.Write("config.json", bytes.substr(0, split));
  folder.Write("model.safetensors", bytes.substr(std::min(split + 1, bytes.size())));
  fusedmoe::VisitCheckpoint(fusedmoe::Checkpoint::Open(folder.path()));
  return 0;
}
