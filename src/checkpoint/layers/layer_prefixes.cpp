#include "checkpoint/layers/layer_prefixes.hpp"

#include <charconv>
#include <optional>
#include <string_view>
#include <utility>

namespace fusedmoe::checkpoint {
namespace {

// Names that hold layers of something else than the language model.
bool IsForeign(std::string_view prefix) {
  for (const std::string_view word : {"vision", "visual", "audio", "mtp", "talker", "draft", "encoder",
                                      "code2wav", "speech", "resampler", "eagle"}) {
    if (prefix.find(word) != std::string_view::npos) {
      return true;
    }
  }
  return false;
}

// The end of "...layers.N." in a name and the number, or nothing.
std::optional<std::pair<size_t, int64_t>> LayerEnd(std::string_view name) {
  for (const std::string_view word : {"layers.", "blocks.", "block.", "h.", "layer.", "blk."}) {
    for (size_t at = name.find(word); at != std::string_view::npos; at = name.find(word, at + 1)) {
      if (at != 0 && name[at - 1] != '.') {
        continue;
      }
      const size_t digits = at + word.size();
      int64_t layer = 0;
      const char* end = name.data() + name.size();
      const auto parsed = std::from_chars(name.data() + digits, end, layer);
      if (parsed.ec == std::errc() && parsed.ptr != end && *parsed.ptr == '.' && layer >= 0) {
        return std::make_pair(static_cast<size_t>(parsed.ptr - name.data()) + 1, layer);
      }
    }
  }
  return std::nullopt;
}

}  // namespace

std::map<int64_t, std::string> FindLayerPrefixes(const TensorStore& store) {
  struct Stack {
    std::map<int64_t, std::string> layers;
    bool has_experts = false;
  };
  // Tensors of a layer follow one another in most files, so the last answer is usually this one too.
  std::map<std::string, Stack> by_stem;
  Stack* current = nullptr;
  std::string_view last;
  for (const TensorInfo& info : store.tensors()) {
    const std::string_view name = info.name;
    const bool expert = name.find("expert") != std::string_view::npos;
    if (!last.empty() && name.starts_with(last)) {
      if (current != nullptr) {
        current->has_experts |= expert;
      }
      continue;
    }
    const auto end = LayerEnd(name);
    if (!end) {
      continue;
    }
    current = nullptr;
    last = name.substr(0, end->first);
    const std::string_view stem = last.substr(0, last.size() - 1 - std::to_string(end->second).size());
    if (IsForeign(stem)) {
      continue;
    }
    current = &by_stem[std::string(stem)];
    current->layers.emplace(end->second, std::string(last));
    current->has_experts |= expert;
  }
  // The stack with the most layers is the model, and one with experts rather than one without.
  const Stack* best = nullptr;
  for (const auto& [stem, stack] : by_stem) {
    const auto rank = [](const Stack& one) { return std::make_pair(one.has_experts, one.layers.size()); };
    if (best == nullptr || rank(stack) > rank(*best)) {
      best = &stack;
    }
  }
  return best == nullptr ? std::map<int64_t, std::string>() : best->layers;
}

}  // namespace fusedmoe::checkpoint
