#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <fusedmoe/checkpoint.hpp>
#include <fusedmoe/communicator.hpp>
#include <fusedmoe/config.hpp>
#include <fusedmoe/cpu_costs.hpp>
#include <fusedmoe/eplb.hpp>
#include <fusedmoe/executor.hpp>
#include <fusedmoe/plan.hpp>
#include <fusedmoe/tensor.hpp>
#include <fusedmoe/workspace.hpp>

namespace fusedmoe {

/// What the end of a step did to the placement of experts. Equal on all ranks, except for what was received.
struct EplbStep {
  int64_t epoch = 0;      ///< of the placement now in force: 0 at first, one more after each switch
  bool planned = false;   ///< an interval ended with this step
  bool switched = false;  ///< a new placement is in force
  std::string kept;       ///< why the old one stayed, where a plan was not carried out
  int64_t slots_changed = 0;
  int64_t experts_received = 0;  ///< by this rank, from others
  int64_t bytes_received = 0;
  double balancedness = 1;          ///< of the window's load on the old placement: mean / busiest rank
  double planned_balancedness = 1;  ///< the same on the new one
};

/// How a layer is loaded, planned and spread; the defaults load it whole for this machine's CPU.
struct LayerOptions {
  /// "cpu", or "cuda": on the card of HostMachine. Then Forward and all it is given lie there.
  std::string device = "cpu";
  std::string backend;  ///< empty or "auto": the first that can
  std::string isa;      ///< empty: the best the machine has
  std::string mode;     ///< empty: chosen by the token count; "latency" or "throughput" forces one
  Determinism determinism = Determinism::kThreadInvariant;    ///< at least; the plan is refused without it
  ActivationMode activation = ActivationMode::kAsCheckpoint;  ///< kA8 is the only one a caller may ask for
  /// How activations that the scheme quantizes are rounded: a rule by the name of docs/numerics.md
  /// ("vllm_nvfp4"), to compute as another program does. Empty: as the tool that wrote the checkpoint. kUsage
  /// for other names, rules of other formats, and schemes that leave activations as they are. Shared experts
  /// in a format that the rule is not of keep their own.
  std::string activation_rule;
  ActivationFormatKind activation_format = ActivationFormatKind::kStandard;
  bool shared_experts = true;  ///< run those that the checkpoint has; false: the routed ones alone
  /// For layers with latent experts. False: the routed experts alone, on rows of the latent width
  /// that the caller projects: `hidden` is that width, logits or ids are given, and shared experts must be
  /// off.
  bool latent_projections = true;
  /// Largest M of one Forward on this rank. Workspaces grow with it (Plan::workspace_bytes), by a factor
  /// of 60 from 16 to 8192 tokens of Qwen3-30B-A3B: say what the engine needs.
  int64_t max_tokens = 8192;
  int64_t plan_tokens = 1;  ///< the token count that the printed costs are for
  /// Folder in which weights of a checkpoint are kept as the backend packs them, to be mapped the next time;
  /// made when it does not exist. Empty: nothing is kept. What was found there, written or refused stands in
  /// selection().notes.
  std::string pack_cache;
  /// What `fusedmoe tune` measured on this machine (ReadCpuCosts); null: the figures of this build. They
  /// decide which kernels multiply an expert of so many tokens, and so the last bits of results.
  std::shared_ptr<const CpuCosts> cpu_costs;
  /// Threads that prepare the weights; the caller's pool may serve here and in Forward. With load balancing
  /// EndStep prepares experts on them too, so that they must live as long as the layer.
  Executor executor;
  /// How the layer is spread over ranks, and the place of this one (MakeParallelConfig). With more than one
  /// rank `communicator` joins them all: every rank loads, then forwards, in step with the others.
  /// `max_tokens` and all other options must be equal on all ranks; tokens of one forward need not.
  ParallelConfig parallel;
  std::shared_ptr<Communicator> communicator;
  EplbOptions eplb;
  /// A number of the caller's for whatever else must be equal on all ranks; compared at load.
  uint64_t fingerprint = 0;
};

/// One layer of experts, loaded and planned: immutable (except for EndStep), callable from many threads at
/// once, each with a workspace of its own. Forward does not allocate, log or decide.
///
/// On several ranks one thread at a time runs the layers of a communicator, in the same order on all ranks: a
/// forward that begins while another uses it is refused (kUsage).
class MoeLayer {
 public:
  /// Reads the layer from a checkpoint, asks the oracle, prepares the weights for the backend that it names.
  /// Errors: kBadInput, with file and tensor, for what is malformed; kUnsupported, with every refusal, where
  /// no backend can run it; kUsage for options that contradict each other or name a backend that does not
  /// exist; kSystem when a file, a card or a rank fails.
  static Result<std::unique_ptr<MoeLayer>> Load(std::shared_ptr<const Checkpoint> checkpoint, int64_t layer,
                                                const LayerOptions& options = {});
  /// The same from weights that an engine already holds in canonical form. `config` describes the whole
  /// layer; on several ranks `experts` are those of this rank (its slices, with tensor parallelism, where the
  /// bias of the down projection is whole and counts once), `shared` and `latent` (where config.latent > 0)
  /// are whole. Give `shared` if and only if config.shared.intermediate > 0; without options.shared_experts
  /// it is ignored.
  static Result<std::unique_ptr<MoeLayer>> Create(const MoeConfig& config, const ExpertSource& experts,
                                                  const RouterWeights& router,
                                                  const LayerOptions& options = {},
                                                  const SharedExpertWeights* shared = nullptr,
                                                  const LatentWeights* latent = nullptr);
  ~MoeLayer();

  const MoeConfig& config() const;      ///< sizes, activation, routing, deployment
  const Scheme& scheme() const;         ///< of the routed experts
  const Scheme* shared_scheme() const;  ///< of the shared experts; null where the layer runs none
  const Plan& plan() const;             ///< backend, mode, layout, bytes and operations
  /// The plan together with every candidate that was refused, and why.
  const Selection& selection() const;

  /// True for a layer on a card.
  bool on_device() const;

  /// Memory for one forward at a time of up to max_tokens tokens, on the device of the layer. Which layers
  /// may share it: workspace.hpp.
  Result<Workspace> CreateWorkspace() const;

  /// What one forward brings: `hidden` [M, H]; beside it router_logits [M, E], or topk_ids (I32 or I64; -1
  /// skips a slot) with topk_weights, both [M, k], or neither, and the router of the layer decides. All but
  /// ids are BF16, F16 or F32. Rows may lie apart (those of `hidden` not between cards), elements of a row
  /// follow each other.
  struct Inputs {
    /// In any of the three, whatever config().dtype is. The router and layers that quantize activations read
    /// the values as they are. Other experts round F16 and F32 rows to bf16 on cards (to F16 beside weights
    /// of F16, not beside F32), and may on CPUs where the dtype of the layer is BF16 and the level
    /// avx512_bf16 or amx; elsewhere they keep 15 bits or more (docs/accuracy.md).
    TensorView hidden;
    TensorView router_logits;
    TensorView topk_ids;
    TensorView topk_weights;
    TensorView token_ids;  ///< [M] I32 or I64, only for hash routing
  };

  /// Where the results go. `output` [M, H] in the dtype of `hidden` or F32; it must not overlap `hidden`. The
  /// others may be empty, and overlap neither these two nor each other. On CPUs rows may lie apart; on cards
  /// those of `output` follow each other.
  struct Outputs {
    MutableTensorView output;
    MutableTensorView topk_ids;      ///< I32 [M, k]
    MutableTensorView topk_weights;  ///< F32 [M, k]
  };

  /// Runs the layer. The same bits for any number of threads of the executor. M may be 0, with views of null
  /// data: of several ranks one without tokens must call it too, since the others wait for its part. Errors:
  /// kUsage when shapes or dtypes do not fit the layer, with both values, when ids are out of range, when the
  /// workspace is too small or lies elsewhere, or while another forward uses the communicator; kBadInput when
  /// a routing callback, a hash table or a token id names what does not exist; kSystem when a card or a rank
  /// fails. All ranks return the same error, except for an unfit workspace or a busy communicator.
  ///
  /// On a card all views are addresses of the card, and Forward only launches kernels in the order of
  /// executor.stream: it neither allocates nor waits, and a CUDA graph can capture it. The host cannot check
  /// ids there: an id or token id out of range skips its slot.
  Status Forward(const Inputs& inputs, const Outputs& outputs, const Workspace& workspace,
                 const Executor& executor = {}) const;

  /// Forward with all views in host memory, wherever the layer runs: on a card it copies in and out, and
  /// returns when the results are there. Ids out of range are kUsage.
  Status ForwardFromHost(const Inputs& inputs, const Outputs& outputs, const Workspace& workspace,
                         const Executor& executor = {}) const;

  /// The short form: logits in, output out.
  Status Forward(TensorView hidden, TensorView router_logits, MutableTensorView output,
                 const Workspace& workspace, const Executor& executor = {}) const;

  /// Ends a step of a layer with load balancing (parallel.enable_eplb): all ranks call it, in step, between
  /// forwards; no forward may be under way on any of them, and workspaces stay valid. At the end of an
  /// interval the ranks add up what they have measured, make the same plan, send one another the experts that
  /// move, build the new placement beside the old one, and vote: all switch before the next forward, or none
  /// does, and the old placement goes on. Until the vote is won nothing of the old placement is touched, so
  /// no token is lost. New experts are prepared on LayerOptions::executor, which must live as long as the
  /// layer. Errors: kUsage without load balancing; kSystem when a rank does not answer.
  Result<EplbStep> EndStep();

  /// The logical expert of each physical slot, rank by rank, of the placement in force: with load balancing
  /// that of the last switch, else the experts themselves. Not while EndStep runs.
  std::vector<int32_t> PhysicalToLogical() const;

 private:
  struct Impl;
  static Result<std::unique_ptr<MoeLayer>> CreateAlone(const MoeConfig& config, const ExpertSource& experts,
                                                       const RouterWeights& router,
                                                       const LayerOptions& options,
                                                       const SharedExpertWeights* shared,
                                                       const LatentWeights* latent);
  static Result<std::unique_ptr<MoeLayer>> LoadAlone(std::shared_ptr<const Checkpoint> checkpoint,
                                                     int64_t layer, const LayerOptions& options);
  static Result<std::unique_ptr<MoeLayer>> AgreeOn(Result<std::unique_ptr<MoeLayer>> layer,
                                                   const LayerOptions& options);
  explicit MoeLayer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace fusedmoe
