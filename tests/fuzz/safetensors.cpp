#include <fusedmoe/safetensors.hpp>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "support/temporary_directory.hpp"

/// A file of any bytes: an error, or tensors whose bytes can all be read and that are the same once written
/// again.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const fusedmoe::test::TemporaryDirectory folder;
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  const auto file = fusedmoe::ReadSafetensors(folder.Write("a.safetensors", bytes));
  if (!file.ok()) {
    if (file.status().ToString().empty()) {
      std::abort();
    }
    return 0;
  }
  unsigned sum = 0;
  for (const auto& [name, tensor] : file->tensors) {
    const auto* begin = tensor.view().data();
    for (int64_t i = 0; i < tensor.view().total_bytes(); ++i) {
      sum += static_cast<unsigned>(begin[i]);
    }
  }
  volatile unsigned keep = sum;
  static_cast<void>(keep);
  const std::string again = folder / "b.safetensors";
  if (fusedmoe::WriteSafetensors(again, file->tensors, file->metadata).ok()) {
    const auto second = fusedmoe::ReadSafetensors(again);
    if (!second.ok() || second->tensors.size() != file->tensors.size()) {
      std::abort();
    }
  }
  return 0;
}
