#include <algorithm>
#include <cstring>
#include <utility>

#include <fmt/format.h>
#include <fusedmoe/jobs/prepare.hpp>
#include <fusedmoe/machine.hpp>
#include <fusedmoe/oracle.hpp>

#include "experts/contracts/common/restore.hpp"
#include "jobs/prepare/prepared_file.hpp"
#include "layer/kernel_builder.hpp"
#include "oracle/host_table.hpp"

namespace fusedmoe {

struct PreparedLayer::Impl {
  std::string path;
  prepared::PreparedFile file;
  std::shared_ptr<const PreparedWeights> weights;  // shares the memory of file.weights

  /// The experts; `as_prepared`: with the layout that they are in.
  ExpertSource Source(bool as_prepared) const {
    ExpertSource source;
    source.num_local_experts = file.description.config.num_experts;
    source.scheme = file.description.scheme;
    source.alike = true;  // stacks of experts
    source.load = [weights = weights, shape = prepared::ShapeOf(file.description)](int64_t expert) {
      return RestoreExpert(*weights, shape, expert);
    };
    if (as_prepared && weights->layout_key != prepared::kCanonicalKey) {
      source.prepared = weights;
    }
    return source;
  }

  Result<std::unique_ptr<MoeLayer>> Load(const LayerOptions& options, bool as_prepared) const {
    Result<std::unique_ptr<MoeLayer>> layer =
        MoeLayer::Create(file.description.config, Source(as_prepared), file.router, options,
                         file.shared ? &*file.shared : nullptr, file.latent ? &*file.latent : nullptr);
    if (!layer.ok() && layer.status().code() != StatusCode::kUsage) {
      return std::move(layer).status().WithFile(path);
    }
    return layer;
  }
};

namespace {

std::string Differs(TensorView actual, TensorView expected) {
  int64_t first = -1, count = 0;
  for (int64_t index = 0; index < actual.total_bytes(); ++index) {
    if (actual.data()[index] != expected.data()[index]) {
      first = first < 0 ? index : first;
      ++count;
    }
  }
  return fmt::format("{} of {} bytes differ, the first at {}", count, actual.total_bytes(), first);
}

/// Router, projections and shared expert beside those of the checkpoint.
Status CompareOthers(const prepared::PreparedFile& own, const Checkpoint& checkpoint, int64_t layer,
                     std::vector<DamagedTensor>& damaged) {
  prepared::PreparedFile other;
  FMOE_ASSIGN_OR_RETURN(other.router, checkpoint.LoadRouter(layer));
  FMOE_ASSIGN_OR_RETURN(other.shared, checkpoint.SharedExperts(layer));
  FMOE_ASSIGN_OR_RETURN(other.latent, checkpoint.Latent(layer));
  FMOE_ASSIGN_OR_RETURN(const std::vector<NamedTensor> ours, prepared::OtherTensors(own));
  FMOE_ASSIGN_OR_RETURN(const std::vector<NamedTensor> theirs, prepared::OtherTensors(other));
  const auto find = [](const std::vector<NamedTensor>& tensors, const std::string& name) {
    return std::find_if(tensors.begin(), tensors.end(),
                        [&](const NamedTensor& tensor) { return tensor.name == name; });
  };
  for (const NamedTensor& mine : ours) {
    const auto found = find(theirs, mine.name);
    if (found == theirs.end() || found->tensor.dtype() != mine.tensor.dtype() ||
        !(found->tensor.shape() == mine.tensor.shape())) {
      damaged.push_back({-1, mine.name,
                         found == theirs.end() ? std::string("the checkpoint has no such tensor")
                                               : std::string("the checkpoint has another shape of it")});
      continue;
    }
    FMOE_ASSIGN_OR_RETURN(const Tensor actual, prepared::Dense(mine.tensor));
    FMOE_ASSIGN_OR_RETURN(const Tensor expected, prepared::Dense(found->tensor));
    if (std::memcmp(actual.view().data(), expected.view().data(),
                    static_cast<size_t>(actual.view().total_bytes())) != 0) {
      damaged.push_back({-1, mine.name, Differs(actual.view(), expected.view())});
    }
  }
  for (const NamedTensor& tensor : theirs) {
    if (find(ours, tensor.name) == ours.end()) {
      damaged.push_back({-1, tensor.name, "the checkpoint has it, the file has not"});
    }
  }
  return Status::Ok();
}

}  // namespace

PreparedLayer::PreparedLayer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
PreparedLayer::~PreparedLayer() = default;

const std::string& PreparedLayer::path() const {
  return impl_->path;
}
const LayerDescription& PreparedLayer::description() const {
  return impl_->file.description;
}
const std::string& PreparedLayer::backend() const {
  return impl_->file.backend;
}
const std::string& PreparedLayer::layout_key() const {
  return impl_->weights->layout_key;
}
const RecipeText& PreparedLayer::recipe() const {
  return impl_->weights->recipe;
}

Result<std::shared_ptr<const PreparedLayer>> PreparedLayer::Open(const std::string& path) {
  auto impl = std::make_unique<Impl>();
  impl->path = path;
  FMOE_ASSIGN_OR_RETURN(impl->file, prepared::ReadPreparedFile(path));
  const Backend* backend = FindBackend(impl->file.backend);
  if (backend == nullptr || backend->layout_key != impl->file.weights.layout_key) {
    return Status::BadInput(fmt::format("the file is in the layout '{}' and names the backend '{}', which {}",
                                        impl->file.weights.layout_key, impl->file.backend,
                                        backend == nullptr ? std::string("does not exist")
                                                           : fmt::format("reads '{}'", backend->layout_key)))
        .WithFile(path);
  }
  impl->weights = std::make_shared<const PreparedWeights>(impl->file.weights);
  return std::shared_ptr<const PreparedLayer>(new PreparedLayer(std::move(impl)));
}

Result<std::unique_ptr<MoeLayer>> PreparedLayer::Load(const LayerOptions& asked_options) const {
  LayerOptions options = asked_options;
  if (NamedBackend(options.backend).empty()) {
    options.backend = backend();
  }
  return impl_->Load(options, true);
}

Result<std::unique_ptr<MoeLayer>> PreparedLayer::LoadCanonical(const LayerOptions& options) const {
  return impl_->Load(options, false);
}

std::vector<DamagedTensor> PreparedLayer::FindDamage(const Executor& executor) const {
  return prepared::FindDamage(impl_->file, executor);
}

Result<std::vector<DamagedTensor>> PreparedLayer::CompareWith(const Checkpoint* checkpoint, int64_t layer,
                                                              const Executor& executor) const {
  const LayerDescription& own = description();
  if (layout_key() == prepared::kCanonicalKey && checkpoint == nullptr) {
    return std::vector<DamagedTensor>();
  }
  ExpertSource source = impl_->Source(false);
  if (checkpoint != nullptr) {
    FMOE_ASSIGN_OR_RETURN(const LayerDescription other, checkpoint->Describe(layer));
    FMOE_ASSIGN_OR_RETURN(source, checkpoint->Experts(layer));
    if (other.config.expert_hidden() != own.config.expert_hidden() ||
        other.config.intermediate != own.config.intermediate ||
        other.config.num_experts != own.config.num_experts ||
        !prepared::SameKind(other.scheme.weight, own.scheme.weight)) {
      return Status::Usage(fmt::format(
          "the prepared layer is {} with {} experts of {} x {}; the checkpoint's is {} with {} of {} x {}",
          own.scheme.name, own.config.num_experts, own.config.intermediate, own.config.expert_hidden(),
          other.scheme.name, other.config.num_experts, other.config.intermediate,
          other.config.expert_hidden()));
    }
  }
  std::vector<DamagedTensor> damaged;
  if (checkpoint != nullptr) {
    FMOE_RETURN_IF_ERROR(CompareOthers(impl_->file, *checkpoint, layer, damaged));
  }
  PreparedWeights again;
  if (layout_key() == prepared::kCanonicalKey) {
    FMOE_ASSIGN_OR_RETURN(again, prepared::StackCanonical(source));
  } else {
    LayerOptions options;
    options.activation_format = own.config.activation_format;
    FMOE_ASSIGN_OR_RETURN(const MoeProblem problem, MakeProblem(own.config, source, options));
    FMOE_ASSIGN_OR_RETURN(again, FindBackend(backend())->prepare(problem, HostMachine(), source, executor));
  }
  if (again.recipe != recipe()) {
    damaged.push_back({-1, "recipe", "the preparation takes other steps"});
  }
  for (const PreparedWeights::Named& named : again.tensors) {
    const Tensor* stored = impl_->weights->Find(named.name);
    if (stored == nullptr || stored->dtype() != named.tensor.dtype() ||
        !(stored->shape() == named.tensor.shape())) {
      damaged.push_back({-1, named.name, "the preparation makes another shape of it"});
      continue;
    }
    const int64_t bytes = stored->view().total_bytes() / stored->dim(0);
    for (int64_t expert = 0; expert < stored->dim(0); ++expert) {
      if (std::memcmp(stored->view().data() + expert * bytes, named.tensor.view().data() + expert * bytes,
                      static_cast<size_t>(bytes)) != 0) {
        damaged.push_back({expert, named.name, Differs(stored->view()[expert], named.tensor.view()[expert])});
      }
    }
  }
  std::stable_sort(damaged.begin(), damaged.end(),
                   [](const DamagedTensor& a, const DamagedTensor& b) { return a.expert < b.expert; });
  return damaged;
}

}  // namespace fusedmoe
