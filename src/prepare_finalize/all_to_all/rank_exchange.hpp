#pragma once

#include <cstdint>
#include <span>

#include "parallel/agreement.hpp"
#include "prepare_finalize/all_to_all/all_to_all.hpp"

namespace fusedmoe {

/// One row on the wire: values, linear scales, expert ids, router weights, each 16-byte aligned.
struct RecordLayout {
  int64_t value_bytes = 0;
  int64_t scale_bytes = 0;
  int64_t ids = 0;  ///< ids, and as many weights, of a record: top_k, or 1 where a record serves one slot
  int64_t scale_offset = 0, ids_offset = 0, weights_offset = 0, bytes = 0;
};
RecordLayout MakeRecordLayout(int64_t value_bytes, int64_t scale_bytes, int64_t ids);

/// What one forward knows between prepare and finalize: lives in the workspace.
struct ExchangeState {
  int64_t num_tokens = 0;              ///< M of this rank
  int64_t share_begin = 0, share = 0;  ///< the tokens that this rank brings in
  int64_t received = 0;                ///< records
  bool weight_on_input = false;
  float tensor_scale = 1.0F;
};

/// Counts and offsets by rank, in the workspace.
struct RankCounts {
  std::span<int64_t> send, send_offset, receive, receive_offset;
};

/// Prepare and finalize of the three protocols; see MakeAllToAllPrepareFinalize. dispatch.cpp holds the way
/// to the experts, combine.cpp the way back.
class AllToAllPrepareFinalize final : public PrepareFinalize {
 public:
  AllToAllPrepareFinalize(AllToAllParts parts, WorkspaceBook& book);

  std::string_view name() const override {
    return protocol_ == WireProtocol::kGather ? std::string_view("gather_scatter")
                                              : std::string_view(parts_.config.parallel.all2all);
  }
  ActivationFormatKind activation_format() const override { return format_; }
  int64_t max_rows() const override { return max_rows_; }
  bool supports_async() const override { return true; }
  Status Prepare(const PrepareInput& input, PrepareOutput& prepared, const Workspace& workspace,
                 const Executor& executor) const override;
  Status FinalizeStart(const FinalizeInput& input, const Workspace& workspace,
                       const Executor& executor) const override;
  Status FinalizeWait(const FinalizeInput& input, MutableTensorView output, const Workspace& workspace,
                      const Executor& executor) const override;
  Status Finalize(const FinalizeInput& input, MutableTensorView output, const Workspace& workspace,
                  const Executor& executor) const override;
  Status Abandon(const Status& status, bool prepared, const Workspace& workspace) const override;

 private:
  bool batched() const { return format_ == ActivationFormatKind::kBatchedExperts; }
  bool by_slot() const { return batched() || parts_.slot_rows; }
  bool sliced() const { return parts_.owners.empty(); }  // every rank has a slice of every expert
  int64_t ranks() const { return tokens_.ranks; }
  int64_t top_k() const { return parts_.config.top_k(); }
  int32_t LocalExpert(int32_t id) const {
    return id < 0 || parts_.expert_map.empty() ? id : parts_.expert_map[static_cast<size_t>(id)];
  }
  /// Whether rank `rank` computes one of these ids.
  bool Contributes(const int32_t* ids, int64_t rank) const;
  RankCounts Counts(int index, const Workspace& workspace) const;
  AgreementMemory Agreement(const Workspace& workspace) const;

  // dispatch.cpp
  RecordLayout Record(DType dtype, bool quantized) const;
  Status CheckTokens(const PrepareInput& input) const;
  Status AgreeToDispatch(const PrepareInput& input, const Status& own, const RecordLayout& record,
                         bool quantize, ExchangeState& state, RankCounts& counts,
                         const Workspace& workspace) const;
  void TranslateIds(const PrepareInput& input, const ExchangeState& state, int32_t* ids) const;
  float ShareAmax(const PrepareInput& input, const ExchangeState& state) const;
  void QuantizeShare(const PrepareInput& input, const ExchangeState& state, const RecordLayout& record,
                     const Workspace& workspace, const Executor& executor) const;
  void ListRecords(const ExchangeState& state, const int32_t* ids, RankCounts& counts, int32_t* list) const;
  void PackRecord(const PrepareInput& input, const ExchangeState& state, const RecordLayout& record,
                  const std::byte* codes, int32_t entry, const int32_t* ids, std::byte* target) const;
  Status Unpack(const RecordLayout& record, DType dtype, bool quantized, PrepareOutput& prepared,
                const Workspace& workspace, const Executor& executor) const;
  Status UnpackBatched(const RecordLayout& record, DType dtype, bool quantized, PrepareOutput& prepared,
                       const Workspace& workspace) const;

  // combine.cpp
  Status AgreeToCombine(const Status& own, const RankCounts& back, const Workspace& workspace) const;
  void ListResults(const FinalizeInput& input, RankCounts& back, const Workspace& workspace) const;
  void PackResults(const FinalizeInput& input, const Workspace& workspace, const Executor& executor) const;
  void ExpectResults(const ExchangeState& state, const int32_t* ids, RankCounts& back, int32_t* table) const;
  Status GatherOutputs(MutableTensorView output, const Workspace& workspace) const;

  AllToAllParts parts_;
  TokenLayout tokens_;
  WireProtocol protocol_;
  ActivationFormatKind format_;
  int64_t max_share_ = 0;
  int64_t max_rows_ = 0;
  int64_t max_sent_ = 0, max_received_ = 0;  // records of one dispatch
  int64_t max_results_ = 0;                  // rows that this rank returns
  int64_t table_width_ = 0;                  // result rows of one token at home
  AgreementSlots agreement_;
  WorkspaceSlot state_, counts_, ids_, list_, codes_, send_, receive_;
  WorkspaceSlot received_ids_, received_weights_;
  WorkspaceSlot batch_rows_, batch_scales_, batch_counts_, batch_place_;
  WorkspaceSlot result_list_, results_, returned_, table_, staging_;
};

/// Index of a RankCounts triple in the workspace.
enum CountsOf : int { kDispatchCounts, kCombineCounts, kOutputCounts, kNumCounts };

}  // namespace fusedmoe
