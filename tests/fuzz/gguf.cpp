#include <fusedmoe/checkpoint.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "fuzz/scratch_folder.hpp"

/// A GGUF file of any bytes (the magic and the version in front): an error, or layers that describe
/// themselves and experts that load or say why not.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const fusedmoe::ScratchFolder folder;
  std::string bytes("GGUF\3\0\0\0", 8);
  bytes.append(reinterpret_cast<const char*>(data), size);
  const auto checkpoint = fusedmoe::Checkpoint::Open(folder.Write("a.gguf", bytes));
  if (!checkpoint.ok()) {
    return 0;
  }
  constexpr size_t kMostLayers = 4;
  const auto& layers = (*checkpoint)->moe_layers();
  for (size_t i = 0; i < std::min(layers.size(), kMostLayers); ++i) {
    if (!(*checkpoint)->Describe(layers[i]).ok()) {
      continue;
    }
    static_cast<void>((*checkpoint)->LoadRouter(layers[i]).ok());
    const auto experts = (*checkpoint)->Experts(layers[i]);
    for (int64_t expert = 0; experts.ok() && expert < std::min<int64_t>(experts->num_local_experts, 2);
         ++expert) {
      static_cast<void>(experts->load(expert).ok());
    }
    static_cast<void>((*checkpoint)->SharedExperts(layers[i]).ok());
  }
  return 0;
}
