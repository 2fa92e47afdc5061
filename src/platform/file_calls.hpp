#pragma once

#include <cstdint>
#include <string>

#include <fusedmoe/status.hpp>

/// What the files of this folder that call the system for files have in common.
namespace fusedmoe::platform {

// Linux transfers at most 0x7ffff000 bytes in one call.
inline constexpr int64_t kLargestTransfer = int64_t{1} << 30;

std::string ErrorText(int error);

/// Why a file of that name cannot be made.
Status NotCreated(const std::string& path, int error);

}  // namespace fusedmoe::platform
