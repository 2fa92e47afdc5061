#include "prepare_finalize/all_to_all/all_to_all.hpp"

#include <algorithm>
#include <vector>

#include <fmt/format.h>

#include "core/checked_math.hpp"
#include "parallel/gather.hpp"
#include "prepare_finalize/all_to_all/rank_exchange.hpp"
#include "quant/activation_quantizer.hpp"

namespace fusedmoe {
namespace {

constexpr int64_t kIndexBytes = static_cast<int64_t>(sizeof(int32_t));
constexpr int64_t kFloatBytes = static_cast<int64_t>(sizeof(float));

}  // namespace

int64_t TokenLayout::ShareBegin(int64_t num_tokens, int64_t of_tp_rank) const {
  return shares_tokens ? num_tokens * of_tp_rank / tp : (of_tp_rank > tp_rank ? num_tokens : 0);
}

int64_t TokenLayout::MaxShare(int64_t max_tokens) const {
  return shares_tokens ? CeilDiv(max_tokens, tp) : max_tokens;
}

TokenLayout TokenLayoutOf(const ParallelConfig& parallel) {
  TokenLayout layout;
  layout.ranks = parallel.use_ep ? parallel.ep_size : parallel.tp_size;
  layout.rank = parallel.use_ep ? parallel.ep_rank : parallel.tp_rank;
  layout.tp = layout.ranks / std::max<int64_t>(1, parallel.dp_size * parallel.pcp_size);
  layout.tp_rank = layout.rank % std::max<int64_t>(1, layout.tp);
  layout.shares_tokens = layout.tp > 1 && !IsSequenceParallel(parallel);
  return layout;
}

WireProtocol ProtocolOf(const ParallelConfig& parallel) {
  const std::optional<AllToAllBackend> backend = ParseAllToAll(parallel.all2all);
  return UseAllToAll(parallel) && backend ? WireProtocolOf(*backend) : WireProtocol::kGather;
}

int64_t MaxDispatchedTokens(const ParallelConfig& parallel, int64_t max_tokens) {
  const TokenLayout layout = TokenLayoutOf(parallel);
  return layout.ranks * layout.MaxShare(max_tokens);
}

RecordLayout MakeRecordLayout(int64_t value_bytes, int64_t scale_bytes, int64_t ids) {
  constexpr int64_t kAlign = 16;
  RecordLayout record;
  record.value_bytes = value_bytes;
  record.scale_bytes = scale_bytes;
  record.ids = ids;
  record.scale_offset = RoundUp(value_bytes, kAlign);
  record.ids_offset = record.scale_offset + RoundUp(scale_bytes, kAlign);
  record.weights_offset = record.ids_offset + ids * kIndexBytes;
  record.bytes = RoundUp(record.weights_offset + ids * kFloatBytes, kAlign);
  return record;
}

AllToAllPrepareFinalize::AllToAllPrepareFinalize(AllToAllParts parts, WorkspaceBook& book)
    : parts_(std::move(parts)),
      tokens_(TokenLayoutOf(parts_.config.parallel)),
      protocol_(ProtocolOf(parts_.config.parallel)),
      format_(protocol_ == WireProtocol::kExpertRows ? ActivationFormatKind::kBatchedExperts
                                                     : ActivationFormatKind::kStandard) {
  const MoeConfig& config = parts_.config;
  const int64_t slots = config.top_k();
  // Rows of one token on one rank, at most: in batches of experts each expert once, else an expert as often
  // as the token names it.
  const int64_t slot_rows = batched() ? std::min(slots, config.num_local_experts) : slots;
  max_share_ = tokens_.MaxShare(config.max_tokens);
  max_rows_ = ranks() * max_share_;
  const int64_t copies = protocol_ == WireProtocol::kGather     ? 1
                         : protocol_ == WireProtocol::kRankRows ? std::min(slots, ranks())
                                                                : slots;
  max_sent_ = max_share_ * copies;
  max_received_ = max_rows_ * (batched() ? slot_rows : 1);
  max_results_ = max_rows_ * (by_slot() ? slot_rows : 1);
  table_width_ = by_slot() ? slots : sliced() ? ranks() : std::min(slots, ranks());
  // Rows keep the dtype of the hidden states, which is known only per call: book for the widest.
  const RecordLayout record =
      MakeRecordLayout(config.hidden * kFloatBytes, ScaleRowBytes(parts_.activation, config.hidden), slots);
  const int64_t row_bytes = config.hidden * kFloatBytes;

  agreement_ = BookAgreement(ranks(), book);
  state_ = book.Book("ranks.state", static_cast<int64_t>(sizeof(ExchangeState)));
  counts_ = book.Book("ranks.counts", 4 * kNumCounts * ranks() * static_cast<int64_t>(sizeof(int64_t)));
  ids_ = book.Book("ranks.ids", max_share_ * slots * kIndexBytes);
  list_ = book.Book("ranks.list", max_sent_ * kIndexBytes);
  if (parts_.activation.quantized() &&
      (parts_.wire != nullptr || !parts_.traits.expects_unquantized_inputs)) {
    codes_ = book.Book("ranks.codes", max_share_ * Record(DType::kF32, true).ids_offset);
  }
  send_ = book.Book("ranks.send", max_sent_ * record.bytes);
  receive_ = book.Book("ranks.receive", max_received_ * record.bytes);
  received_ids_ = book.Book("ranks.received_ids", max_received_ * slots * kIndexBytes);
  received_weights_ = book.Book("ranks.received_weights", max_received_ * slots * kFloatBytes);
  if (batched()) {
    const int64_t rows = config.num_local_experts * max_rows_;
    batch_rows_ = book.Book("ranks.batch_rows", rows * row_bytes);
    batch_scales_ = book.Book("ranks.batch_scales", rows * ScaleRowBytes(parts_.activation, config.hidden));
    batch_counts_ = book.Book("ranks.batch_counts", config.num_local_experts * kIndexBytes);
    batch_place_ = book.Book("ranks.batch_place", 2 * max_received_ * kIndexBytes);
  }
  result_list_ = book.Book("ranks.result_list", 2 * max_results_ * kIndexBytes);
  results_ = book.Book("ranks.results", max_results_ * row_bytes);
  returned_ = book.Book("ranks.returned", max_share_ * table_width_ * row_bytes);
  table_ = book.Book("ranks.table", max_share_ * table_width_ * kIndexBytes);
  if (tokens_.shares_tokens) {
    staging_ = book.Book("ranks.outputs", config.max_tokens * row_bytes);
  }
}

RankCounts AllToAllPrepareFinalize::Counts(int index, const Workspace& workspace) const {
  int64_t* numbers = workspace.Get<int64_t>(counts_) + 4 * index * ranks();
  const auto count = static_cast<size_t>(ranks());
  return {{numbers, count},
          {numbers + ranks(), count},
          {numbers + 2 * ranks(), count},
          {numbers + 3 * ranks(), count}};
}

AgreementMemory AllToAllPrepareFinalize::Agreement(const Workspace& workspace) const {
  return AgreementMemoryOf(agreement_, ranks(), workspace);
}

bool AllToAllPrepareFinalize::Contributes(const int32_t* ids, int64_t rank) const {
  if (sliced()) {
    return true;
  }
  return std::any_of(ids, ids + top_k(),
                     [&](int32_t id) { return id >= 0 && parts_.owners[static_cast<size_t>(id)] == rank; });
}

Status ChooseWire(Communicator& communicator, WireChoice& choice) {
  struct Offer {
    int32_t possible = 0, any = 0;
    float scale = 0;
    int32_t reserved = 0;
  };
  const Offer own{choice.possible ? 1 : 0, choice.any ? 1 : 0, choice.scale, 0};
  FMOE_ASSIGN_OR_RETURN(const std::vector<Offer> offers, GatherFromRanks(communicator, "load scales", own));
  const Offer* first = nullptr;
  choice.codes = true;
  for (const Offer& offer : offers) {
    if (offer.any == 0) {
      first = first == nullptr ? &offer : first;
      choice.codes = choice.codes && offer.possible != 0 && offer.scale == first->scale;
    }
  }
  choice.codes = choice.codes && first != nullptr;
  choice.scale = choice.codes ? first->scale : choice.scale;
  return Status::Ok();
}

Status CheckPlace(const ParallelConfig& parallel, const Communicator& communicator) {
  const TokenLayout layout = TokenLayoutOf(parallel);
  if (communicator.size() != layout.ranks || communicator.rank() != layout.rank) {
    return Status::Usage(
        fmt::format("the parallel configuration is that of rank {} of {}, the communicator "
                    "that of rank {} of {}",
                    layout.rank, layout.ranks, communicator.rank(), communicator.size()));
  }
  return Status::Ok();
}

Result<std::unique_ptr<PrepareFinalize>> MakeAllToAllPrepareFinalize(AllToAllParts parts,
                                                                     WorkspaceBook& book) {
  FMOE_RETURN_IF_ERROR(CheckPlace(parts.config.parallel, *parts.communicator));
  const bool batched = ProtocolOf(parts.config.parallel) == WireProtocol::kExpertRows;
  if (parts.slot_rows && !batched && parts.traits.weight_and_reduce != WeightAndReduceKind::kContiguous) {
    return Status::Unsupported(
        "unreduced rows are to travel home, but these experts add up the slots of a token");
  }
  if (parts.slot_rows && parts.owners.empty()) {
    return Status::Unsupported(
        "tensor parallelism splits the sums themselves: its result is not that of one rank bit for bit");
  }
  if (parts.activation.static_tensor_scale && !parts.traits.expects_unquantized_inputs &&
      !parts.traits.input_tensor_scale) {
    return Status::Unsupported(
        "the prepare step must quantize by a stored input scale, but the experts do not share one");
  }
  return std::unique_ptr<PrepareFinalize>(new AllToAllPrepareFinalize(std::move(parts), book));
}

}  // namespace fusedmoe
