#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <fusedmoe/dtype.hpp>
#include <fusedmoe/safetensors.hpp>
#include <fusedmoe/status.hpp>
#include <fusedmoe/tensor.hpp>

#include "platform/file.hpp"

namespace fusedmoe::checkpoint {

/// One entry of a safetensors header. An entry that this library cannot compute on (unknown dtype, too many
/// dimensions) is kept with the reason in `problem`, so that the other tensors of the file stay usable.
struct HeaderEntry {
  std::string name;
  DType dtype = DType::kU8;
  Shape shape;
  int64_t begin = 0, end = 0;  ///< bytes of the file
  std::string problem;
};

struct SafetensorsHeader {
  std::vector<HeaderEntry> entries;  ///< by position in the file
  SafetensorsMetadata metadata;
};

/// Reads and checks the header of an open file, without touching the data, by what docs/checkpoints.md, "What
/// is refused", says of safetensors; errors name the file and, where there is one, the tensor.
Result<SafetensorsHeader> ReadSafetensorsHeader(const platform::InputFile& file);

/// True for valid UTF-8.
bool IsUtf8(std::string_view text);

/// The largest header that is read or written.
inline constexpr int64_t kMaxHeaderBytes = 100'000'000;

}  // namespace fusedmoe::checkpoint
