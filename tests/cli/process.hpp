#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "support/files.hpp"
#include "support/temporary_directory.hpp"

namespace fusedmoe::test {

/// The level of the CPU kernels that every machine of this architecture is expected to have.
#if defined(__aarch64__)
inline constexpr const char* kFirstIsa = "neon";
#else
inline constexpr const char* kFirstIsa = "avx2";
#endif

/// A level of the other architecture, which no machine of this one has.
#if defined(__aarch64__)
inline constexpr const char* kForeignIsa = "avx2";
#else
inline constexpr const char* kForeignIsa = "neon";
#endif

/// What a finished process left behind.
struct ProcessResult {
  int exit_code = -1;  ///< -1: killed by a signal, or not started
  std::string out;
  std::string err;
  int64_t peak_bytes = 0;  ///< most memory that it had
  /// stdout as JSON; a test failure and null when it is none.
  nlohmann::json Json() const;
};

/// The built `fusedmoe` command, behind what runs programs of this build where it was cross-compiled.
std::vector<std::string> CommandWords();

/// The same for a shell.
std::string CommandText();

/// Runs the built `fusedmoe` command with these arguments and waits for it.
ProcessResult RunCommand(const std::vector<std::string>& arguments);

}  // namespace fusedmoe::test
