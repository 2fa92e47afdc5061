#include "layer/balance.hpp"

#include <algorithm>
#include <set>
#include <utility>

#include <fmt/format.h>

#include "layer/expert_mover.hpp"
#include "layer/layer_impl.hpp"
#include "layer/rank_plan.hpp"
#include "parallel/agreement.hpp"

namespace fusedmoe {
namespace {

/// One attempt to place the experts anew. The ranks pass its stages together; each stage ends with a vote,
/// and only the last one changes anything that forwards use.
class Rebalancing {
 public:
  Rebalancing(const LayerBalance& balance, EplbStep& step)
      : balance_(balance), communicator_(*balance.options.communicator), step_(step), state_(balance.state) {}

  /// Ok with `accepted()`: all ranks may switch. Ok without: the old placement stays, `step.kept` says why.
  /// Errors: the communication failed.
  Status Run(int64_t workspace_bytes, const std::function<void(WorkspaceBook&)>& book_layer) {
    FMOE_RETURN_IF_ERROR(ShareLoads());
    if (accepted_) {
      FMOE_RETURN_IF_ERROR(Plan());
    }
    if (accepted_ && step_.slots_changed > 0) {
      FMOE_RETURN_IF_ERROR(Move());
      FMOE_RETURN_IF_ERROR(accepted_ ? Build(workspace_bytes, book_layer) : Status::Ok());
    }
    return Status::Ok();
  }
  bool accepted() const { return accepted_ && step_.slots_changed > 0; }

  EplbState& state() { return state_; }
  BuiltKernel& built() { return built_; }
  ExpertSource& source() { return source_; }
  const WorkspaceBook& book() const { return book_; }

 private:
  Status VoteOn(std::string_view operation, const Status& own, uint64_t value) {
    RowAgreement agreement;
    agreement.fingerprint = Fingerprint(operation, balance_.fingerprint) ^ value;
    agreement.epoch = balance_.epoch;
    agreement.other_fingerprint = "has another load window or plan";
    Status verdict;
    FMOE_RETURN_IF_ERROR(Vote(communicator_, operation, agreement, own, verdict));
    accepted_ = verdict.ok();
    step_.kept = verdict.ok() ? "" : verdict.ToString();
    return Status::Ok();
  }

  // Window sums of all ranks, added in rank order (whole numbers: any order would do).
  Status ShareLoads() {
    const int64_t experts = balance_.whole.num_experts, ranks = communicator_.size();
    const int64_t forwards = balance_.forwards.load();
    FMOE_RETURN_IF_ERROR(
        VoteOn("eplb loads",
               forwards == 0
                   ? Status::Ok()
                   : Status::Usage(fmt::format("{} forwards are under way at the end of a step", forwards)),
               0));
    if (!accepted_) {
      return Status::Ok();
    }
    const std::vector<double> own = balance_.state.LogicalLoad();
    std::vector<double> all(static_cast<size_t>(experts * ranks));
    const std::vector<int64_t> ones(static_cast<size_t>(ranks), 1), zeros(static_cast<size_t>(ranks), 0);
    std::vector<int64_t> ascending(static_cast<size_t>(ranks));
    for (int64_t rank = 0; rank < ranks; ++rank) {
      ascending[static_cast<size_t>(rank)] = rank;
    }
    RowExchange exchange;
    exchange.operation = "eplb loads";
    exchange.row_bytes = experts * static_cast<int64_t>(sizeof(double));
    exchange.send = reinterpret_cast<const std::byte*>(own.data());
    exchange.receive = reinterpret_cast<std::byte*>(all.data());
    exchange.send_rows = exchange.receive_rows = ones;
    exchange.send_offsets = zeros;
    exchange.receive_offsets = ascending;
    FMOE_RETURN_IF_ERROR(communicator_.Exchange(exchange));
    load_.assign(static_cast<size_t>(experts), 0.0);
    for (size_t index = 0; index < all.size(); ++index) {
      load_[index % load_.size()] += all[index];
    }
    return Status::Ok();
  }

  Status Plan() {
    const int64_t ranks = communicator_.size();
    step_.balancedness = Balancedness(PhysicalLoad(balance_.state.maps(0), load_), ranks);
    const Result<int64_t> changed = state_.Rearrange(load_);
    step_.slots_changed = changed.ok() ? *changed : 0;
    step_.planned_balancedness = Balancedness(PhysicalLoad(state_.maps(0), load_), ranks);
    const std::vector<int32_t>& map = state_.maps(0).physical_to_logical;
    return VoteOn("eplb plan", changed.status(), Digest(map.data(), static_cast<int64_t>(map.size() * 4)));
  }

  // The experts that this rank will need and does not have, into memory beside those in use.
  Status Move() {
    const std::vector<int32_t>& before = balance_.physical_to_logical();
    const std::vector<int32_t>& after = state_.maps(0).physical_to_logical;
    Result<RankPlan> old = PlanOf(before), next = PlanOf(after);
    Status own = old.ok() ? next.status() : old.status();
    if (own.ok()) {
      own = mover_.Open(balance_.source, old->local_experts, PlanMoves(before, after, communicator_.size()),
                        communicator_);
    }
    FMOE_RETURN_IF_ERROR(VoteOn("eplb room", own, static_cast<uint64_t>(mover_.blob_bytes())));
    if (!accepted_) {
      return Status::Ok();
    }
    FMOE_RETURN_IF_ERROR(mover_.Run(communicator_));
    step_.experts_received = mover_.experts_received();
    step_.bytes_received = mover_.bytes_received();
    local_experts_ = next->local_experts;
    return Status::Ok();
  }

  Status Build(int64_t workspace_bytes, const std::function<void(WorkspaceBook&)>& book_layer) {
    Status own = mover_.fault();
    if (own.ok()) {
      book_layer(book_);
      own = BuildShadow();
    }
    if (own.ok() && book_.total_bytes() > workspace_bytes) {
      own = Status::System(fmt::format("the new placement needs a workspace of {} bytes, there are {}",
                                       book_.total_bytes(), workspace_bytes));
    }
    FMOE_RETURN_IF_ERROR(VoteOn("eplb vote", own, 1));
    return accepted_ ? ChooseWire(communicator_, *built_.wire) : Status::Ok();
  }

  Status BuildShadow() {
    FMOE_ASSIGN_OR_RETURN(source_, mover_.Source(local_experts_));
    ExpertPlacement placement{state_.maps(0).physical_to_logical, balance_.epoch + 1, balance_.load};
    FMOE_ASSIGN_OR_RETURN(built_, BuildKernel(balance_.whole, source_, balance_.options,
                                              balance_.shared ? &*balance_.shared : nullptr, book_, placement,
                                              balance_.latent));
    if (balance_.reload != nullptr) {
      FMOE_ASSIGN_OR_RETURN(source_, balance_.reload(local_experts_));
    }
    return Status::Ok();
  }

  Result<RankPlan> PlanOf(const std::vector<int32_t>& map) const {
    return PlanRank(balance_.whole, balance_.source.scheme, balance_.options.parallel, map);
  }

  const LayerBalance& balance_;
  Communicator& communicator_;
  EplbStep& step_;
  EplbState state_;  // as it will be
  std::vector<double> load_;
  ExpertMover mover_;
  std::vector<int64_t> local_experts_;
  ExpertSource source_;
  BuiltKernel built_;
  WorkspaceBook book_;
  bool accepted_ = false;
};

}  // namespace

void LayerBalance::ResetLoad() {
  for (size_t slot = 0; slot < recorded.size(); ++slot) {
    recorded[slot] = 0;
    load[slot].store(0, std::memory_order_relaxed);
  }
}

Result<bool> LayerBalance::RecordStep() {
  std::vector<int64_t> step(recorded.size());
  for (size_t slot = 0; slot < step.size(); ++slot) {
    const int64_t now = load[slot].load(std::memory_order_relaxed);
    step[slot] = now - recorded[slot];
    recorded[slot] = now;
  }
  return state.RecordStep(step);
}

Result<std::unique_ptr<LayerBalance>> MakeBalance(const MoeConfig& whole, const ExpertSource& source,
                                                  const LayerOptions& options,
                                                  const SharedExpertWeights* shared) {
  EplbShape shape;
  shape.num_experts = whole.num_experts;
  shape.num_physical = whole.num_experts + options.parallel.num_redundant_experts;
  shape.num_groups = std::max<int64_t>(1, whole.routing.num_groups);
  shape.num_ranks = options.parallel.ep_size;
  std::set<int64_t> nodes;
  for (int64_t rank = 0; rank < shape.num_ranks; ++rank) {
    nodes.insert(options.communicator->node_of(rank));
  }
  shape.num_nodes = static_cast<int64_t>(nodes.size());
  FMOE_ASSIGN_OR_RETURN(EplbState state, EplbState::Create(shape, 1, options.eplb));
  auto balance = std::make_unique<LayerBalance>(std::move(state));
  balance->whole = whole;
  balance->options = options;
  balance->source = source;
  if (shared != nullptr) {
    balance->shared = *shared;
  }
  balance->recorded.assign(static_cast<size_t>(shape.num_physical), 0);
  balance->load.reset(new std::atomic<int64_t>[static_cast<size_t>(shape.num_physical)]);
  balance->ResetLoad();
  return balance;
}

std::vector<int32_t> MoeLayer::PhysicalToLogical() const {
  return impl_->balance != nullptr ? impl_->balance->physical_to_logical()
                                   : InitialPhysicalToLogical(impl_->config.num_experts, 0);
}

Result<EplbStep> MoeLayer::EndStep() {
  if (impl_->balance == nullptr) {
    return Status::Usage("the layer has no load balancing: it is for expert-parallel ranks that ask for it");
  }
  LayerBalance& balance = *impl_->balance;
  EplbStep step;
  FMOE_ASSIGN_OR_RETURN(step.planned, balance.RecordStep());
  step.epoch = balance.epoch;
  if (!step.planned) {
    return step;
  }
  const CommunicatorLock lock(impl_->ranks.get());
  if (Status status = lock.status(); !status.ok()) {
    balance.state.Postpone();
    return status;
  }
  Rebalancing next(balance, step);
  FMOE_RETURN_IF_ERROR(next.Run(impl_->workspace_bytes, [&](WorkspaceBook& book) { impl_->Book(book); }));
  if (!next.accepted()) {
    balance.state.Postpone();
    return step;
  }
  // The vote is won on every rank: from here on nothing can fail.
  impl_->kernel = std::move(next.built().kernel);
  impl_->wire = std::move(next.built().wire);
  next.built().selection.chosen->workspace.assign(next.book().entries().begin(), next.book().entries().end());
  next.built().selection.chosen->workspace_bytes = impl_->workspace_bytes;
  impl_->selection = std::move(next.built().selection);
  balance.state = std::move(next.state());
  balance.source = std::move(next.source());
  balance.ResetLoad();
  step.epoch = ++balance.epoch;
  step.switched = true;
  return step;
}

}  // namespace fusedmoe
