#include <fusedmoe/jobs/prepare.hpp>

#include <algorithm>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <fusedmoe/machine.hpp>
#include <fusedmoe/oracle.hpp>

#include "core/names.hpp"
#include "experts/contracts/common/restore.hpp"
#include "jobs/prepare/prepared_file.hpp"
#include "layer/kernel_builder.hpp"
#include "oracle/host_table.hpp"
#include "oracle/select.hpp"
#include "weights/steps/layout_shapes.hpp"

namespace fusedmoe {

using prepared::PreparedFile;

namespace prepared {

Result<PreparedWeights> StackCanonical(const ExpertSource& source) {
  PreparedWeights canonical;
  canonical.layout_key = kCanonicalKey;
  for (int64_t index = 0; index < source.num_local_experts; ++index) {
    Result<CanonicalExpert> expert = source.load(index);
    if (!expert.ok()) {
      return std::move(expert).status().WithContext("expert " + std::to_string(index));
    }
    FMOE_RETURN_IF_ERROR(CheckFusable(*expert));
    const std::vector<TensorPlan> plans = FusedTensors(ShapeOf(*expert), PartsOf(*expert));
    for (size_t tensor = 0; index == 0 && tensor < plans.size(); ++tensor) {
      FMOE_ASSIGN_OR_RETURN(
          Tensor stacked,
          Tensor::Allocate(plans[tensor].dtype,
                           Shape{source.num_local_experts, plans[tensor].shape[0], plans[tensor].shape[1]}));
      canonical.tensors.push_back({plans[tensor].name, std::move(stacked)});
    }
    for (size_t tensor = 0; tensor < plans.size(); ++tensor) {
      FMOE_RETURN_IF_ERROR(
          FuseTensor(*expert, plans[tensor],
                     canonical.tensors[tensor].tensor.mutable_view().data() + index * plans[tensor].bytes()));
    }
  }
  return canonical;
}

}  // namespace prepared

namespace {

void Count(const PreparedWeights& weights, PrepareReport& report) {
  report.layout_key = weights.layout_key;
  report.recipe = weights.recipe;
  report.layout_error = weights.layout_error;
  report.tensors = static_cast<int64_t>(weights.tensors.size());
  for (const PreparedWeights::Named& named : weights.tensors) {
    const int64_t bytes = named.tensor.view().total_bytes();
    report.prepared_bytes += bytes;
    report.canonical_bytes += named.name.starts_with("canonical.") ? bytes : 0;
    report.expert_bytes += bytes / named.tensor.dim(0);
  }
}

/// What one expert takes as the source hands it out (mapped files take nothing), with the scalars and lists
/// of groups that its steps look at. Its format: scales may be of another 16-bit type than the scheme's name
/// tells.
Result<int64_t> LoadedBytes(const ExpertSource& source, WeightFormat& format) {
  const int64_t before = TensorBytes();
  FMOE_ASSIGN_OR_RETURN(const CanonicalExpert expert, source.load(0));
  int64_t bytes = TensorBytes() - before;
  format = ShapeOf(expert).format;
  for (const TensorPlan& plan : FusedTensors(ShapeOf(expert), PartsOf(expert))) {
    const bool list = plan.name.ends_with("_group_index");
    bytes += list || plan.name.ends_with("tensor_scale") ? (list ? 3 : 1) * plan.bytes() : 0;
  }
  return bytes;
}

/// The same bytes for every machine.
bool HasLayoutToWrite(const Backend& backend) {
  return !backend.layout_key.empty() && backend.layout_key != prepared::kCanonicalKey &&
         backend.layout_key != "cpu_panels";
}

}  // namespace

std::vector<std::string> BackendsWithLayouts() {
  std::vector<std::string> names;
  for (const HostBackend& row : HostTable()) {
    if (row.backend != nullptr && HasLayoutToWrite(*row.backend)) {
      names.emplace_back(row.name);
    }
  }
  return names;
}

Result<PrepareReport> WritePrepared(const Checkpoint& checkpoint, int64_t layer, const LayerOptions& options,
                                    const std::string& path) {
  PreparedFile file;
  FMOE_ASSIGN_OR_RETURN(file.description, checkpoint.Describe(layer));
  FMOE_ASSIGN_OR_RETURN(file.router, checkpoint.LoadRouter(layer));
  FMOE_ASSIGN_OR_RETURN(file.shared, checkpoint.SharedExperts(layer));
  FMOE_ASSIGN_OR_RETURN(file.latent, checkpoint.Latent(layer));
  FMOE_ASSIGN_OR_RETURN(const ExpertSource source, checkpoint.Experts(layer));
  FMOE_ASSIGN_OR_RETURN(const MoeProblem problem, MakeProblem(file.description.config, source, options));
  file.description.config.activation_format = options.activation_format;
  SelectionRequest request;
  request.backend = options.backend;
  FMOE_ASSIGN_OR_RETURN(const Selection selection, SelectBackend(problem, HostMachine(), request));
  FMOE_RETURN_IF_ERROR(ToStatus(selection));
  PrepareReport report;
  report.backend = file.backend = selection.chosen->backend;
  const Backend* backend = FindBackend(report.backend);
  if (!HasLayoutToWrite(*backend)) {
    const bool canonical = backend->layout_key == prepared::kCanonicalKey;
    return Status::Unsupported(
               fmt::format("{} {}", report.backend,
                           canonical
                               ? "computes on the canonical form and has no layout to write"
                               : "makes its layout when a layer is loaded, for the machine that runs it"))
        .WithHint(fmt::format("fusedmoe run CHECKPOINT needs no prepared file; layouts to write have {}",
                              fmt::join(BackendsWithLayouts(), ", ")));
  }
  FMOE_ASSIGN_OR_RETURN(const int64_t loaded_bytes, LoadedBytes(source, file.description.scheme.weight));
  const int64_t before = TensorBytes();
  ResetPeakTensorBytes();
  FMOE_ASSIGN_OR_RETURN(file.weights, backend->prepare(problem, HostMachine(), source, options.executor));
  report.peak_bytes = PeakTensorBytes() - before;
  report.experts_at_a_time = std::max(options.executor.num_threads, 1);
  Count(file.weights, report);
  report.expert_bytes = std::max(report.expert_bytes, loaded_bytes);
  FMOE_RETURN_IF_ERROR(prepared::WritePreparedFile(file, path, options.executor));
  return report;
}

Result<PrepareReport> InvertPrepared(const std::string& prepared_path, const std::string& path,
                                     const std::string& asked_backend) {
  FMOE_ASSIGN_OR_RETURN(PreparedFile file, prepared::ReadPreparedFile(prepared_path));
  if (!NamedBackend(asked_backend).empty()) {
    const Backend* backend = FindBackend(asked_backend);
    if (backend == nullptr) {
      return UnknownName("backend", asked_backend, JoinNames(BackendsWithLayouts()));
    }
    if (backend->layout_key != file.weights.layout_key) {
      return Status::Unsupported(fmt::format("the file is in the layout '{}'; {} reads '{}'",
                                             file.weights.layout_key, asked_backend, backend->layout_key))
          .WithFile(prepared_path);
    }
  }
  if (const std::vector<DamagedTensor> damaged = prepared::FindDamage(file, {}); !damaged.empty()) {
    const DamagedTensor& first = damaged.front();
    return Status::BadInput(fmt::format("{}{}",
                                        first.expert < 0 ? "" : fmt::format("expert {}: ", first.expert),
                                        first.what))
        .WithFile(prepared_path)
        .WithTensor(first.tensor);
  }
  ExpertSource source;
  source.num_local_experts = file.description.config.num_experts;
  source.scheme = file.description.scheme;
  source.load = [&file](int64_t expert) {
    return RestoreExpert(file.weights, prepared::ShapeOf(file.description), expert);
  };
  PrepareReport report;
  const int64_t before = TensorBytes();
  ResetPeakTensorBytes();
  Result<PreparedWeights> canonical = prepared::StackCanonical(source);
  if (!canonical.ok()) {
    return std::move(canonical).status().WithFile(prepared_path);
  }
  report.peak_bytes = PeakTensorBytes() - before;
  report.backend = "REFERENCE";
  // Only what every layout leads back to, so that the bytes do not tell from which one they came.
  PreparedFile inverted = file;
  inverted.backend = report.backend;
  inverted.weights = *std::move(canonical);
  inverted.description.config.activation_format = ActivationFormatKind::kStandard;
  Count(inverted.weights, report);
  FMOE_RETURN_IF_ERROR(prepared::WritePreparedFile(inverted, path, {}));
  return report;
}

}  // namespace fusedmoe
