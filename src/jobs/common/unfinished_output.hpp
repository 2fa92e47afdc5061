#pragma once

#include <memory>
#include <string>
#include <vector>

#include <fusedmoe/status.hpp>

#include "platform/file_lock.hpp"

namespace fusedmoe::jobs {

/// What the jobs say of their work, beside what they wrote.
inline constexpr const char* kQuantizationReport = "quantization_report.json";
inline constexpr const char* kConversionReport = "conversion_report.json";

/// Where a checkpoint is written.
struct OutputPlace {
  std::string directory;
  bool overwrite = false;  ///< replace the checkpoint that stands there
  /// What the new one is made from: the checkpoint and its files; empty: nothing.
  std::vector<std::string> sources;
  bool gguf = false;  ///< a name that ends in ".gguf" is that of a single file
};

/// A directory under construction, next to its final place under another name: nothing stands under the final
/// name until Commit, and a run that was killed leaves at most the other directory, which the next run clears
/// away. Of a single GGUF file, Commit keeps nothing else.
class UnfinishedOutput {
 public:
  /// kUsage when the place is taken: by a file or a folder that is not empty, unless `overwrite` is set, or
  /// by another run that writes there now; when it is a link that leads nowhere, or a folder that is the root
  /// of a file system, which no other can take the place of. Commit removes a folder that it replaces with
  /// all that is in it, so never one of `sources`, a folder around it, or one that is no checkpoint (kUsage).
  static Result<std::unique_ptr<UnfinishedOutput>> Take(const OutputPlace& place);
  /// Without Commit: nothing stays.
  ~UnfinishedOutput();
  UnfinishedOutput(const UnfinishedOutput&) = delete;
  UnfinishedOutput& operator=(const UnfinishedOutput&) = delete;

  /// Where the files are until Commit.
  const std::string& path() const { return temporary_; }
  bool single_file() const { return single_file_; }
  /// Name of the GGUF file in it.
  const std::string& gguf_name() const { return gguf_name_; }
  std::string gguf_path() const { return temporary_ + "/" + gguf_name_; }
  /// Moves the directory, or the file, to its final name.
  Status Commit();

 private:
  UnfinishedOutput() = default;

  std::string final_, temporary_, gguf_name_ = "model.gguf";
  bool overwrite_ = false, committed_ = false, single_file_ = false;
  std::unique_ptr<platform::FileLock> lock_;  // of the mark in `temporary_`
};

}  // namespace fusedmoe::jobs
