// Routing, a warp a token. Everything that is compared is computed by score_math.hpp as the CPU computes it;
// a warp only changes who computes what: maxima and the order of experts do not depend on that, and sums have
// an order that a warp keeps.

#include <algorithm>

#include "core/checked_math.hpp"
#include "platform/cuda/card.hpp"
#include "platform/cuda/error.hpp"
#include "routing/cuda/router_kernels.cuh"
#include "routing/score_math.hpp"

namespace fusedmoe::cuda {
namespace {

constexpr int kWarp = 32;
constexpr unsigned kAll = 0xffffffffU;

/// Room of a token in shared memory.
struct TokenRoom {
  float *logit, *score, *choice, *group, *weight;
  int32_t* id;
};

__device__ inline double AddLanes(double value) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    value += __shfl_down_sync(kAll, value, distance);
  }
  return __shfl_sync(kAll, value, 0);
}

/// The largest of each lane's value; NaN is passed over.
__device__ inline float MaxLanes(float value) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    const float other = __shfl_xor_sync(kAll, value, distance);
    value = other > value ? other : value;
  }
  return value;
}

__device__ inline float MinusInfinity() {
  return FloatFromBits(0xff800000U);
}

__device__ float Largest(const float* values, int count, int lane) {
  float largest = MinusInfinity();
  for (int expert = lane; expert < count; expert += kWarp) {
    largest = values[expert] > largest ? values[expert] : largest;
  }
  return MaxLanes(largest);
}

__device__ void ComputeScores(Score score, const RouteArguments& call, const TokenRoom& room, int lane) {
  const int count = call.num_experts;
  if (score == Score::kSoftmax) {
    // A NaN anywhere makes the sum NaN and all scores 0, as it does when the maximum starts from it.
    const float largest = Largest(room.logit, count, lane);
    double sum = 0.0;
    for (int expert = lane; expert < count; expert += kWarp) {
      room.score[expert] = ScoreExp(room.logit[expert] - largest);
      sum += room.score[expert];
    }
    const auto divisor = static_cast<float>(AddLanes(sum));
    for (int expert = lane; expert < count; expert += kWarp) {
      room.score[expert] = ZeroUnlessFinite(room.score[expert] / divisor);
    }
  } else {
    for (int expert = lane; expert < count; expert += kWarp) {
      const float x = room.logit[expert];
      room.score[expert] = score == Score::kLogit     ? (x == MinusInfinity() ? x : ZeroUnlessFinite(x))
                           : score == Score::kSigmoid ? ZeroUnlessFinite(ScoreSigmoid(x))
                                                      : ZeroUnlessFinite(sqrtf(ScoreSoftplus(x)));
    }
  }
  __syncwarp();
}

__device__ void MaskGroups(const RouteArguments& call, const TokenRoom& room, int lane) {
  const int size = call.num_experts / call.num_groups;
  for (int group = lane; group < call.num_groups; group += kWarp) {
    float first = MinusInfinity(), second = MinusInfinity();
    for (int index = 0; index < size; ++index) {
      const float value = room.choice[group * size + index];
      if (value > first) {
        second = first;
        first = value;
      } else if (value > second) {
        second = value;
      }
    }
    room.group[group] = call.groups_by_two && size > 1 ? first + second : first;
  }
  __syncwarp();
  for (int group = lane; group < call.num_groups; group += kWarp) {
    int better = 0;
    for (int other = 0; other < call.num_groups && better < call.topk_groups; ++other) {
      better += Before(room.group[other], other, room.group[group], group) ? 1 : 0;
    }
    for (int expert = group * size; better >= call.topk_groups && expert < (group + 1) * size; ++expert) {
      room.choice[expert] = nanf("");  // before nothing: the choice of others may be -inf
    }
  }
  __syncwarp();
}

__device__ void ComputeChoices(const RouteArguments& call, const TokenRoom& room, int lane) {
  for (int expert = lane; expert < call.num_experts; expert += kWarp) {
    const float choice = room.score[expert] + (call.bias == nullptr ? 0.0F : call.bias[expert]);
    room.choice[expert] = choice != choice ? 0.0F : choice;
  }
  __syncwarp();
  if (call.topk_groups != kEveryGroup && call.topk_groups < call.num_groups) {
    MaskGroups(call, room, lane);
  }
}

/// The first of the experts not taken, by Before; bit i of `taken` is the lane's i-th expert.
__device__ int BestLeft(const float* values, int count, uint64_t taken, int lane) {
  float best = MinusInfinity();
  int index = 0x7fffffff;
  int step = 0;
  for (int expert = lane; expert < count; expert += kWarp, ++step) {
    const float value = values[expert];
    if ((taken >> step & 1U) == 0 && Before(value, expert, best, index)) {
      best = value;
      index = expert;
    }
  }
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    const float other = __shfl_xor_sync(kAll, best, distance);
    const int other_index = __shfl_xor_sync(kAll, index, distance);
    if (Before(other, other_index, best, index)) {
      best = other;
      index = other_index;
    }
  }
  return index;
}

__device__ void SelectTopK(const RouteArguments& call, const TokenRoom& room, int lane) {
  const int parts = call.topk_groups == kEveryGroup ? call.num_groups : 1;
  const int size = call.num_experts / parts, kept = call.top_k / parts;
  for (int part = 0; part < parts; ++part) {
    uint64_t taken = 0;
    for (int slot = 0; slot < kept; ++slot) {
      const int best = BestLeft(room.choice + part * size, size, taken, lane);
      if (best % kWarp == lane) {
        taken |= uint64_t{1} << (best / kWarp);
      }
      if (lane == 0) {
        room.id[part * kept + slot] = part * size + best;
      }
    }
  }
  __syncwarp();
}

/// By lane 0: a token has few slots, and their sum is in slot order.
__device__ void Renormalize(const RouteArguments& call, const TokenRoom& room) {
  double sum = 0.0;
  for (int slot = 0; slot < call.top_k; ++slot) {
    sum += room.weight[slot];
  }
  sum += call.epsilon;
  const float divisor = sum > 0.0 ? static_cast<float>(sum) : 1.0F;
  for (int slot = 0; slot < call.top_k; ++slot) {
    room.weight[slot] = room.weight[slot] / divisor;
  }
}

__device__ void ComputeWeights(const RouteArguments& call, const TokenRoom& room, int lane) {
  const int count = call.num_experts;
  const bool softmax = call.weighting == Weighting::kSoftmax || call.weighting == Weighting::kSoftmaxAll;
  float largest = 0.0F;
  bool exists = true;
  double sum = 0.0;
  if (softmax) {
    largest = Largest(room.logit, count, lane);
    bool finite = true;
    for (int expert = lane; expert < count; expert += kWarp) {
      finite = finite && room.logit[expert] < FloatFromBits(0x7f800000U);  // false for NaN, too
    }
    exists = __all_sync(kAll, finite) && largest > MinusInfinity();
    if (call.weighting == Weighting::kSoftmaxAll && exists) {
      for (int expert = lane; expert < count; expert += kWarp) {
        sum += ScoreExp(room.logit[expert] - largest);
      }
      sum = AddLanes(sum);
    }
  }
  for (int slot = lane; slot < call.top_k; slot += kWarp) {
    const int id = room.id[slot];
    float weight = 0.0F;
    if (id < 0) {
      weight = 0.0F;
    } else if (softmax) {
      weight = exists ? ScoreExp(room.logit[id] - largest) : 0.0F;
      if (call.weighting == Weighting::kSoftmaxAll && exists) {
        weight = weight / static_cast<float>(sum);
      }
    } else if (call.weighting == Weighting::kSigmoid) {
      weight = ScoreSigmoid(room.score[id]);
    } else {
      weight = ZeroUnlessFinite(room.score[id]);
    }
    room.weight[slot] = weight;
  }
  __syncwarp();
  if (lane == 0 && (call.weighting == Weighting::kSum || (call.weighting == Weighting::kSoftmax && exists))) {
    Renormalize(call, room);
  }
  __syncwarp();
}

__device__ void SelectSparseMixer(const RouteArguments& call, const TokenRoom& room, int lane) {
  uint64_t taken = 0;
  for (int slot = 0; slot < call.top_k; ++slot) {
    const int best = BestLeft(room.score, call.num_experts, taken, lane);
    const float largest = room.score[best];
    float weight = 0.0F;
    if (largest > MinusInfinity()) {
      double sum = 0.0;
      int step = 0;
      for (int expert = lane; expert < call.num_experts; expert += kWarp, ++step) {
        const float x = room.score[expert];
        const float magnitude = fabsf(x) > largest ? fabsf(x) : largest;
        const bool far = (largest - x) / magnitude > 2.0F * call.jitter;
        const bool out = far || (taken >> step & 1U) != 0 || x == MinusInfinity();
        sum += out ? 0.0 : static_cast<double>(ScoreExp(x - largest));
      }
      weight = static_cast<float>(1.0 / AddLanes(sum));
    }
    if (best % kWarp == lane) {
      taken |= uint64_t{1} << (best / kWarp);
    }
    if (lane == 0) {
      room.id[slot] = best;
      room.weight[slot] = weight;
    }
  }
  __syncwarp();
}

__device__ void SortByWeight(const RouteArguments& call, const TokenRoom& room) {
  for (int slot = 1; slot < call.top_k; ++slot) {
    const int32_t id = room.id[slot];
    const float weight = room.weight[slot];
    int place = slot;
    for (; place > 0 && Before(weight, id, room.weight[place - 1], room.id[place - 1]); --place) {
      room.id[place] = room.id[place - 1];
      room.weight[place] = room.weight[place - 1];
    }
    room.id[place] = id;
    room.weight[place] = weight;
  }
}

__host__ __device__ inline int RoomWords(int num_experts, int top_k) {
  return 4 * num_experts + 2 * top_k;
}

__global__ void RouteKernel(const RouteArguments call) {
  extern __shared__ float memory[];
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  const int64_t token = int64_t{blockIdx.x} * (blockDim.x / kWarp) + warp;
  if (token >= call.num_tokens) {
    return;  // whole warps: nobody waits for it
  }
  float* own = memory + warp * RoomWords(call.num_experts, call.top_k);
  const int count = call.num_experts;
  const TokenRoom room{own,
                       own + count,
                       own + 2 * count,
                       own + 3 * count,
                       own + 4 * count,
                       reinterpret_cast<int32_t*>(own + 4 * count + call.top_k)};
  const std::byte* row = call.logits.data + token * call.logits.stride_bytes;
  for (int expert = lane; expert < count; expert += kWarp) {
    const float x = LoadFloat(row, call.logits.dtype, expert);
    room.logit[expert] = call.softcap > 0.0F ? ScoreSoftcap(x, call.softcap) : x;
  }
  __syncwarp();
  if (call.sparse_mixer) {
    ComputeScores(Score::kLogit, call, room, lane);
    SelectSparseMixer(call, room, lane);
  } else {
    ComputeScores(call.score, call, room, lane);
    if (call.hashed) {
      const int64_t id = LoadInteger(call.token_ids, call.token_id_dtype, token);
      for (int slot = lane; slot < call.top_k; slot += kWarp) {
        room.id[slot] = id >= 0 && id < call.vocabulary ? call.table[id * call.top_k + slot] : -1;
      }
      __syncwarp();
    } else {
      ComputeChoices(call, room, lane);
      SelectTopK(call, room, lane);
    }
    ComputeWeights(call, room, lane);
  }
  if (lane == 0) {
    for (int slot = 0; slot < call.top_k; ++slot) {
      room.weight[slot] *= call.scaling_factor;
    }
    if (!call.hashed) {
      SortByWeight(call, room);
    }
  }
  __syncwarp();
  for (int slot = lane; slot < call.top_k; slot += kWarp) {
    call.ids[token * call.top_k + slot] = room.id[slot];
    call.weights[token * call.top_k + slot] = room.weight[slot];
  }
}

}  // namespace

Status LaunchRoute(const RouteArguments& call, cudaStream_t stream) {
  const int room_bytes = RoomWords(call.num_experts, call.top_k) * 4;
  // What a launch may ask for without an attribute. 2048 experts: 48 KiB at most.
  constexpr int kSharedBytes = 48 << 10;
  const int warps = std::clamp(kSharedBytes / room_bytes, 1, 4);
  ForgetErrors();
  RouteKernel<<<static_cast<unsigned>(CeilDiv(call.num_tokens, warps)), static_cast<unsigned>(warps * kWarp),
                static_cast<size_t>(warps * room_bytes), stream>>>(call);
  return CheckLaunch("RouteKernel");
}

}  // namespace fusedmoe::cuda
