#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include <fusedmoe/checkpoint.hpp>

#include "support/temporary_directory.hpp"

/// Checkpoints made in the test, sound ones and damaged ones: files are written byte by byte, so that headers
/// can lie.
namespace fusedmoe::testing_support {

/// One tensor of a file under construction.
struct RawTensor {
  std::string name;
  std::string dtype = "F32";
  std::vector<int64_t> shape;
  std::string bytes;
};

using test::TemporaryDirectory;

/// Length, header and data as a safetensors file has them.
std::string Container(const std::string& header, const std::string& data);
/// A valid file of these tensors, in the order given.
std::string Safetensors(const std::vector<RawTensor>& tensors);
/// The header of such a file.
nlohmann::ordered_json Header(const std::vector<RawTensor>& tensors);

RawTensor Floats(std::string name, std::vector<int64_t> shape, float value);
RawTensor Bf16(std::string name, std::vector<int64_t> shape, float value);
/// `count` elements of any type, every byte `byte`.
RawTensor Bytes(std::string name, std::string dtype, std::vector<int64_t> shape, int64_t element_bytes,
                unsigned char byte);
RawTensor Ints(std::string name, std::vector<int64_t> shape, const std::vector<int32_t>& values);
RawTensor Longs(std::string name, const std::vector<int64_t>& values);

inline constexpr int64_t kHidden = 64, kIntermediate = 32, kExperts = 2;

/// A Qwen3-MoE layer of two experts in one of the formats: "bf16", "modelopt_nvfp4", "modelopt_fp8",
/// "ct_nvfp4", "ct_mxfp4", "ct_int4", "ct_int8", "fp8_block", "gptq", "awq", "quark_mxfp4", "autoround".
struct TinyModel {
  explicit TinyModel(const std::string& format);
  nlohmann::ordered_json config;
  std::vector<RawTensor> tensors;
  RawTensor& Find(const std::string& name);
  void Drop(const std::string& name);
  /// Writes config.json and model.safetensors.
  void WriteTo(const TemporaryDirectory& folder) const;
};

/// A model as a checkpoint on disk, and the experts of its layer 0 or why they cannot be had.
struct WrittenModel {
  explicit WrittenModel(const TinyModel& model);
  TemporaryDirectory folder;
  std::shared_ptr<const Checkpoint> checkpoint;
  Result<ExpertSource> source;
};

/// `text` with every `from` as `to`.
std::string Replaced(std::string text, const std::string& from, const std::string& to);

/// Counts a malformed checkpoint. At the end of a whole run of the program their number is printed, and fewer
/// than kLeastMalformed of them fail it.
void CountMalformed();
inline constexpr int64_t kLeastMalformed = 1000;

/// Opens the folder and loads all of layer 0: the first failure, or ok.
Status LoadEverything(const std::filesystem::path& folder, const CheckpointOptions& options = {});

/// The same of a model that is written for it.
Status LoadEverything(const TinyModel& model);

/// Expects of parts of a tensor that they can be read alone.
void ExpectBytesAlone(const Checkpoint& checkpoint, const std::string& name);

/// How a malformed model must be refused.
struct Expected {
  StatusCode code = StatusCode::kBadInput;
  std::string tensor;  // empty: any
};

/// Counts the model and expects that status, with a file named.
void ExpectRefused(const std::string& what, const TinyModel& model, const Expected& expected = {});

}  // namespace fusedmoe::testing_support
