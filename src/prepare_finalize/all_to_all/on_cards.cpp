#include "prepare_finalize/all_to_all/on_cards.hpp"

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "moe/cuda/row_ops.hpp"
#include "parallel/agreement.hpp"
#include "parallel/card_gather.hpp"
#include "prepare_finalize/all_to_all/operations.hpp"

namespace fusedmoe {
namespace {

constexpr int64_t kWordBytes = 4;  // ids, router weights, partial sums

/// Counts and offsets of one exchange.
struct Counts {
  explicit Counts(int64_t ranks)
      : send(static_cast<size_t>(ranks)), send_at(send), receive(send), receive_at(send) {}
  void Clear() {
    for (std::vector<int64_t>* part : {&send, &send_at, &receive, &receive_at}) {
      std::fill(part->begin(), part->end(), 0);
    }
  }
  std::vector<int64_t> send, send_at, receive, receive_at;
};

class GatherOnCards final : public PrepareFinalize {
 public:
  GatherOnCards(AllToAllParts parts, WorkspaceBook& book)
      : parts_(std::move(parts)),
        tokens_(TokenLayoutOf(parts_.config.parallel)),
        same_tokens_(tokens_.shares_tokens && tokens_.tp == tokens_.ranks),
        max_share_(tokens_.MaxShare(parts_.config.max_tokens)),
        host_(std::make_unique<Host>(tokens_.ranks)) {
    const MoeConfig& config = parts_.config;
    const int64_t rows = tokens_.ranks * max_share_, row_bytes = config.hidden * kWordBytes;
    if (!same_tokens_) {  // rows keep the dtype of the hidden states, known only per call: for the widest
      rows_ = book.Book("ranks.rows", rows * row_bytes);
      ids_ = book.Book("ranks.ids", rows * config.top_k() * kWordBytes);
      weights_ = book.Book("ranks.weights", rows * config.top_k() * kWordBytes);
    }
    const int64_t all = tokens_.ranks * config.max_tokens * row_bytes;
    const int64_t one_step = same_tokens_ ? std::min(all, 2 * kOneStepBytes) : 0;
    partials_ = book.Book("ranks.partials", std::max(rows * row_bytes, one_step));
  }

  std::string_view name() const override { return "gather_scatter"; }
  ActivationFormatKind activation_format() const override { return ActivationFormatKind::kStandard; }
  int64_t max_rows() const override {
    return same_tokens_ ? parts_.config.max_tokens : tokens_.ranks * max_share_;
  }

  Status Prepare(const PrepareInput& input, PrepareOutput& prepared, const Workspace& workspace,
                 const Executor& executor) const override {
    Host& host = *host_;
    host.num_tokens = input.hidden.dim(0);
    FMOE_RETURN_IF_ERROR(AgreeOnShares(input));
    prepared.num_tokens = std::accumulate(host.shares.begin(), host.shares.end(), int64_t{0});
    prepared.topk_ids = input.topk_ids;
    prepared.topk_weights = input.topk_weights;
    prepared.rows.values = input.hidden;
    if (same_tokens_ || prepared.num_tokens == 0) {
      return Status::Ok();
    }
    auto* const rows = workspace.Get<std::byte>(rows_);
    auto* const ids = workspace.Get<int32_t>(ids_);
    auto* const weights = workspace.Get<float>(weights_);
    prepared.rows.values =
        TensorView(rows, input.hidden.dtype(), {prepared.num_tokens, parts_.config.hidden});
    prepared.topk_ids = ids;
    prepared.topk_weights = weights;
    host.counts.Clear();
    for (size_t peer = 0; peer < host.shares.size(); ++peer) {
      host.counts.send[peer] = Share();
      host.counts.send_at[peer] = ShareBegin();
      host.counts.receive[peer] = host.shares[peer];
      host.counts.receive_at[peer] = host.begins[peer];
    }
    const int64_t slot_bytes = parts_.config.top_k() * kWordBytes;
    const RowExchange gather[] = {
        Exchange(kDispatchRows, input.hidden.row_bytes(), input.hidden.data(), rows),
        Exchange(kDispatchIds, slot_bytes, input.topk_ids, ids),
        Exchange(kDispatchWeights, slot_bytes, input.topk_weights, weights)};
    const Status sent = parts_.communicator->Enqueue(gather, executor.stream);
    return sent.ok() ? sent : Close(sent);
  }

  Status Finalize(const FinalizeInput& input, MutableTensorView output, const Workspace& workspace,
                  const Executor& executor) const override {
    return Close(Combine(input, output, workspace, executor));
  }

  // Before the agreement, a rank that fails takes part in it and says so; behind it, it does at the close.
  Status Abandon(const Status& status, bool prepared, const Workspace& /*workspace*/) const override {
    if (prepared) {
      return Close(status);
    }
    RowAgreement agreement;
    agreement.header_operation = kDispatchHeader;
    agreement.verdict_operation = kDispatchAgreement;
    agreement.tokens = -1;
    return AgreeOnRows(*parts_.communicator, agreement, status, host_->agreement.memory(), {});
  }

 private:
  /// What one forward knows; allocated once, since the workspace is on the card.
  struct Host {
    explicit Host(int64_t ranks)
        : agreement(ranks),
          counts(ranks),
          shares(static_cast<size_t>(ranks)),
          begins(shares),
          limits(shares) {}
    AgreementStorage agreement;
    Counts counts;
    int64_t num_tokens = 0;
    std::vector<int64_t> shares, begins;  ///< of all ranks, in the order of ranks
    std::vector<int64_t> limits;
  };

  int64_t ShareBegin() const { return tokens_.ShareBegin(host_->num_tokens, tokens_.tp_rank); }
  int64_t Share() const { return tokens_.ShareBegin(host_->num_tokens, tokens_.tp_rank + 1) - ShareBegin(); }

  // The other ranks' cards wait for the rows of this one. If it could not enqueue them, all give up at once.
  Status Close(const Status& own) const {
    Status outcome = AgreeOnOutcome(*parts_.communicator, "forward close", own, host_->agreement.memory());
    if (!outcome.ok()) {
      parts_.communicator->GiveUp(outcome);
    }
    return outcome;
  }

  // Partial sums go home, and are added there in the order of ranks.
  Status Combine(const FinalizeInput& input, MutableTensorView output, const Workspace& workspace,
                 const Executor& executor) const {
    const Host& host = *host_;
    const int64_t row_bytes = parts_.config.hidden * kWordBytes;
    auto* const received = workspace.Get<float>(partials_);
    const auto* const partial = input.expert_output.as<float>();
    const bool one_step = same_tokens_ && ReducesInOneStep(tokens_.ranks, host.num_tokens, row_bytes);
    const int64_t begin = one_step ? 0 : host.begins[static_cast<size_t>(tokens_.rank)];
    const int64_t count = one_step ? host.num_tokens : Share();
    host_->counts.Clear();
    for (size_t peer = 0; peer < host.shares.size(); ++peer) {
      if (static_cast<int64_t>(peer) != tokens_.rank) {
        host_->counts.send[peer] = one_step ? host.num_tokens : host.shares[peer];
        host_->counts.send_at[peer] = one_step ? 0 : host.begins[peer];
        host_->counts.receive[peer] = count;
        host_->counts.receive_at[peer] = static_cast<int64_t>(peer) * count;
      }
    }
    const RowExchange combine = Exchange(kCombineRows, row_bytes, partial, received);
    FMOE_RETURN_IF_ERROR(parts_.communicator->Enqueue({&combine, 1}, executor.stream));
    cuda::RankRows sums;
    sums.own = partial + begin * parts_.config.hidden;
    sums.received = received;
    sums.rank_stride = count * parts_.config.hidden;
    sums.rank = static_cast<int>(tokens_.rank);
    sums.ranks = static_cast<int>(tokens_.ranks);
    const int64_t first = one_step ? 0 : ShareBegin();
    FMOE_RETURN_IF_ERROR(cuda::AddRankRows(sums, output.Rows(first, count), executor.stream));
    return tokens_.shares_tokens && !one_step ? GatherOutputs(output, executor.stream) : Status::Ok();
  }

  RowExchange Exchange(std::string_view operation, int64_t row_bytes, const void* send, void* receive) const {
    RowExchange exchange;
    exchange.operation = operation;
    exchange.row_bytes = row_bytes;
    exchange.send = static_cast<const std::byte*>(send);
    exchange.send_rows = host_->counts.send;
    exchange.send_offsets = host_->counts.send_at;
    exchange.receive = static_cast<std::byte*>(receive);
    exchange.receive_rows = host_->counts.receive;
    exchange.receive_offsets = host_->counts.receive_at;
    return exchange;
  }

  Status AgreeOnShares(const PrepareInput& input) const {
    Host& host = *host_;
    Status own = parts_.communicator->Enqueue({}, nullptr);
    if (own.ok() && host.num_tokens > parts_.config.max_tokens) {
      own = Status::Usage(fmt::format("{} tokens, the exchange was planned for {} a rank", host.num_tokens,
                                      parts_.config.max_tokens));
    }
    std::fill(host.counts.send.begin(), host.counts.send.end(), Share());
    std::fill(host.limits.begin(), host.limits.end(), max_share_);
    RowAgreement agreement;
    agreement.header_operation = kDispatchHeader;
    agreement.verdict_operation = kDispatchAgreement;
    agreement.fingerprint = parts_.fingerprint * 31 + static_cast<uint64_t>(input.hidden.dtype());
    if (tokens_.shares_tokens) {  // outputs travel as they are
      agreement.fingerprint = agreement.fingerprint * 31 + static_cast<uint64_t>(input.output);
    }
    agreement.row_bytes = input.hidden.row_bytes();
    agreement.tokens = host.num_tokens;
    agreement.send_rows = host.counts.send;
    agreement.max_rows = host.limits;
    if (tokens_.shares_tokens && own.ok()) {
      agreement.same_tokens_begin = tokens_.rank - tokens_.tp_rank;
      agreement.same_tokens_end = agreement.same_tokens_begin + tokens_.tp;
    }
    FMOE_RETURN_IF_ERROR(
        AgreeOnRows(*parts_.communicator, agreement, own, host.agreement.memory(), host.shares));
    std::exclusive_scan(host.shares.begin(), host.shares.end(), host.begins.begin(), int64_t{0});
    return Status::Ok();
  }

  // Every rank of a tensor-parallel group has reduced its share of the same tokens; all want all of them.
  Status GatherOutputs(MutableTensorView output, void* stream) const {
    Counts& counts = host_->counts;
    counts.Clear();
    const int64_t group = tokens_.rank - tokens_.tp_rank;
    for (int64_t peer = 0; peer < tokens_.tp; ++peer) {
      if (peer != tokens_.tp_rank) {
        const auto rank = static_cast<size_t>(group + peer);
        counts.send[rank] = Share();
        counts.send_at[rank] = ShareBegin();
        counts.receive_at[rank] = tokens_.ShareBegin(host_->num_tokens, peer);
        counts.receive[rank] = tokens_.ShareBegin(host_->num_tokens, peer + 1) - counts.receive_at[rank];
      }
    }
    const RowExchange gather = Exchange(kOutputRows, output.row_bytes(), output.data(), output.data());
    return parts_.communicator->Enqueue({&gather, 1}, stream);
  }

  AllToAllParts parts_;
  TokenLayout tokens_;
  bool same_tokens_;  ///< on all ranks
  int64_t max_share_;
  std::unique_ptr<Host> host_;
  WorkspaceSlot rows_, ids_, weights_, partials_;
};

}  // namespace

Result<std::unique_ptr<PrepareFinalize>> MakeGatherOnCards(AllToAllParts parts, WorkspaceBook& book) {
  if (!parts.communicator->on_cards()) {
    return Status::Usage(fmt::format("ranks on cards exchange rows through NCCL; the communicator is '{}'",
                                     parts.communicator->name()))
        .WithHint("NcclCommunicator makes one from it");
  }
  FMOE_RETURN_IF_ERROR(CheckPlace(parts.config.parallel, *parts.communicator));
  if (ProtocolOf(parts.config.parallel) != WireProtocol::kGather) {
    return Status::Unsupported(
        fmt::format("'{}' sends rows where their ids say, and on cards no host knows the "
                    "ids; ranks on cards gather",
                    parts.config.parallel.all2all));
  }
  return std::unique_ptr<PrepareFinalize>(std::make_unique<GatherOnCards>(std::move(parts), book));
}

}  // namespace fusedmoe
