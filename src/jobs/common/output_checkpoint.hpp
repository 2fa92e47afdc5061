#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <fusedmoe/executor.hpp>
#include <fusedmoe/safetensors.hpp>

#include "checkpoint/gguf/gguf_writer.hpp"
#include "jobs/common/unfinished_output.hpp"

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
  int64_t max_shard_bytes = kUsualShardBytes;
  Executor executor;
  /// Units done and in all; one call at a time. May be empty.
  std::function<void(int64_t done, int64_t total)> progress;
  bool hash = true;  ///< ContentHash is wanted
};

/// A checkpoint under construction: its files and tensors.
class OutputCheckpoint {
 public:
  static Result<std::unique_ptr<OutputCheckpoint>> Create(const OutputPlace& place);

  /// Where the files are until Commit.
  const std::string& path() const { return output_->path(); }
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
  std::string gguf_path() const { return output_->gguf_path(); }
  /// Over names, types, shapes and bytes of all tensors written with WriteOptions::hash.
  std::string ContentHash() const;
  int64_t bytes() const { return bytes_; }
  const std::vector<std::string>& files() const { return files_; }
  /// Moves all to its final name.
  Status Commit();

 private:
  explicit OutputCheckpoint(std::unique_ptr<UnfinishedOutput> output) : output_(std::move(output)) {}
  Status WriteShard(const std::string& file, const Unit* units, int64_t count, const WriteOptions& options,
                    int64_t& done, int64_t total);
  // Makes units and hands what they made to `write`, one tensor at a time.
  Status MakeUnits(const Unit* units, int64_t count, const WriteOptions& options, int64_t& done,
                   int64_t total, const std::function<Status(const Unit&, const NamedTensor&)>& write);

  std::unique_ptr<UnfinishedOutput> output_;
  int64_t bytes_ = 0;
  std::vector<std::string> files_;
  std::map<std::string, std::string> tensor_hashes_;
};

}  // namespace fusedmoe::jobs
