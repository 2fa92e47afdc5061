#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <fusedmoe/executor.hpp>
#include <fusedmoe/safetensors.hpp>

#include "checkpoint/gguf/gguf_writer.hpp"
#include "platform/file.hpp"

namespace fusedmoe::jobs {

/// Tensors that are made together, in one call, and then written.
struct Unit {
  std::vector<TensorSpec> specs;
  /// Called once, from any thread. The executor is that of the job for a unit that is `large`, else serial.
  std::function<Result<std::vector<NamedTensor>>(const Executor& executor)> make;
  bool large = false;  ///< made alone, by all threads; the others are made side by side
  int64_t part = 0;    ///< WriteGguf: which part of its tensors they are
  int64_t bytes() const;
};

struct WriteOptions {
  int64_t max_shard_bytes = 5'000'000'000;
  Executor executor;
  /// Units done and in all; one call at a time. May be empty.
  std::function<void(int64_t done, int64_t total)> progress;
  bool hash = true;  ///< ContentHash is wanted
};

/// Where a checkpoint is written.
struct OutputPlace {
  std::string directory;
  bool overwrite = false;  ///< replace the checkpoint that stands there
  std::string source;      ///< the checkpoint that the new one is made from; empty: none
  bool gguf = false;       ///< a name that ends in ".gguf" is that of a single file
};

/// A checkpoint directory under construction, next to its final place under another name: nothing stands
/// under the final name until Commit, and a run that was killed leaves at most the other directory, which the
/// next run clears away. Of a single GGUF file, Commit keeps nothing else.
class OutputCheckpoint {
 public:
  /// kUsage when the place is taken: by a file or a folder that is not empty, unless `overwrite` is set, or
  /// by another run that writes there now. Commit removes a folder that it replaces with all that is in it,
  /// so never `source`, a folder around it, or one that is no checkpoint (kUsage).
  static Result<std::unique_ptr<OutputCheckpoint>> Create(const OutputPlace& place);
  ~OutputCheckpoint();
  OutputCheckpoint(const OutputCheckpoint&) = delete;
  OutputCheckpoint& operator=(const OutputCheckpoint&) = delete;

  /// Where the files are until Commit.
  const std::string& path() const { return temporary_; }
  Status WriteText(const std::string& file, const std::string& text);
  /// A safetensors file beside the weights, in a folder of its own where `file` names one.
  Status WriteTensors(const std::string& file, std::span<const NamedTensor> tensors);
  /// Copies the small files of another checkpoint: tokenizer, generation settings, licence. Weights,
  /// config.json and quantization metadata are left out.
  Status CopySideFiles(const std::string& source);
  /// Makes and writes all units, in one file or in shards with an index; as many units at a time as there are
  /// threads. The bytes do not depend on their number.
  Status WriteWeights(const std::vector<Unit>& units, const WriteOptions& options);
  /// The same as one GGUF file, of which each unit makes pieces; its path is gguf_path().
  Status WriteGguf(const std::vector<checkpoint::GgufEntry>& entries,
                   const std::vector<checkpoint::GgufSpec>& specs, const std::vector<Unit>& units,
                   const WriteOptions& options);
  std::string gguf_path() const { return temporary_ + "/" + gguf_name_; }
  /// Over names, types, shapes and bytes of all tensors written with WriteOptions::hash.
  std::string ContentHash() const;
  int64_t bytes() const { return bytes_; }
  const std::vector<std::string>& files() const { return files_; }
  /// Moves the directory to its final name.
  Status Commit();

 private:
  OutputCheckpoint(std::string directory, std::string temporary, bool overwrite)
      : final_(std::move(directory)), temporary_(std::move(temporary)), overwrite_(overwrite) {}
  Status WriteShard(const std::string& file, const Unit* units, int64_t count, const WriteOptions& options,
                    int64_t& done, int64_t total);
  // Makes units and hands what they made to `write`, one tensor at a time.
  Status MakeUnits(const Unit* units, int64_t count, const WriteOptions& options, int64_t& done,
                   int64_t total, const std::function<Status(const Unit&, const NamedTensor&)>& write);

  std::string final_, temporary_, gguf_name_ = "model.gguf";
  bool overwrite_ = false, committed_ = false, single_file_ = false;
  int64_t bytes_ = 0;
  std::vector<std::string> files_;
  std::map<std::string, std::string> tensor_hashes_;
  std::unique_ptr<platform::FileLock> lock_;  // of the mark in `temporary_`
};

}  // namespace fusedmoe::jobs
