#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <fusedmoe/dtype.hpp>
#include <fusedmoe/status.hpp>
#include <fusedmoe/tensor.hpp>

namespace fusedmoe {

/// A tensor and its name in a file.
struct NamedTensor {
  std::string name;
  Tensor tensor;
};

using SafetensorsMetadata = std::map<std::string, std::string>;

/// The contents of one safetensors file, in the order of the data.
struct SafetensorsFile {
  std::vector<NamedTensor> tensors;
  SafetensorsMetadata metadata;
  /// The tensor of that name, or null.
  const Tensor* Find(std::string_view name) const;
};

/// Reads a whole file into memory. Strict (docs/checkpoints.md): kBadInput names file and tensor.
Result<SafetensorsFile> ReadSafetensors(const std::string& path);

/// The largest file of a checkpoint that is written in shards, unless its options say otherwise.
inline constexpr int64_t kUsualShardBytes = 5'000'000'000;

/// What a tensor of a file under construction will be.
struct TensorSpec {
  std::string name;
  DType dtype = DType::kF32;
  Shape shape;
};

/// Writes one file tensor by tensor, in bounded memory: the header goes first, then each tensor to its place,
/// in any order. The bytes depend on specs, metadata and data only: tensors lie by falling dtype order, then
/// by name. Nothing stands under the final name until Finish. Not thread-safe.
class SafetensorsWriter {
 public:
  /// Refuses (kUsage) empty or repeated names, names with control characters, dtypes that safetensors does
  /// not know and headers above 100 MB.
  static Result<std::unique_ptr<SafetensorsWriter>> Create(const std::string& path,
                                                           std::vector<TensorSpec> specs,
                                                           const SafetensorsMetadata& metadata = {});
  ~SafetensorsWriter();

  /// Dense or strided; dtype and shape must be those of the spec, and each tensor is written once (kUsage
  /// otherwise).
  Status Write(std::string_view name, TensorView tensor);
  /// Fails (kUsage) when a tensor is missing. Moves the file to its final name.
  Status Finish();
  /// Bytes of header and data together.
  int64_t file_bytes() const;

 private:
  struct Impl;
  explicit SafetensorsWriter(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

/// Whether a file can be written at `path`, asked before the work that fills it; creates nothing. kUsage for
/// an empty path, a folder or a device; kSystem for a folder that is missing or must not be written.
Status CheckSafetensorsPlace(const std::string& path);

/// Writes a whole file at once; what stands at `path` stays until the new one is complete.
Status WriteSafetensors(const std::string& path, std::span<const NamedTensor> tensors,
                        const SafetensorsMetadata& metadata = {});

}  // namespace fusedmoe
