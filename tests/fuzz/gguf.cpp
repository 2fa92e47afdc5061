#include <fusedmoe/checkpoint.hpp>

#include <cstddef>
#include <cstdint>
#include <string>

#include "fuzz/visit_checkpoint.hpp"
#include "support/temporary_directory.hpp"

/// A GGUF file of any bytes (the magic and the version in front): an error, or layers that describe
/// themselves and experts that load or say why not.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const fusedmoe::test::TemporaryDirectory folder;
  std::string bytes("GGUF\3\0\0\0", 8);
  bytes.append(reinterpret_cast<const char*>(data), size);
  fusedmoe::VisitCheckpoint(fusedmoe::Checkpoint::Open(folder.Write("a.gguf", bytes)));
  return 0;
}
