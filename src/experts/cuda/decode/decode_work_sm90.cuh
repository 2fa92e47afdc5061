#pragma once

#include <type_traits>

#include "experts/cuda/decode/decode_exchange_sm90.cuh"
#include "experts/cuda/decode/decode_rows_sm90.cuh"
#include "experts/cuda/device/activate.cuh"
#include "experts/cuda/device/fragments.cuh"

/// What a warp of the decode kernel does with its chunks of a segment: products, sums of row blocks, and what
/// follows them.
namespace fusedmoe::cuda {

template <FragmentFormat kFormat, bool kOperands, int SPC, int NT>
struct DecodeWork {
  using Format = Fragments<kFormat>;
  static constexpr int kStep = Format::kGroupSlabs > 1 ? Format::kGroupSlabs : 1;  // slabs handled together
  static constexpr bool kHalves = Format::kHalves;
  static constexpr bool kGrouped = Format::kPlace == ScalePlace::kAccumulator || kHalves;
  static constexpr bool kRaw = kOperands && Format::kMayBeRaw;
  static constexpr bool kTokenGroups = kOperands && Format::kTokenGroups;
  static constexpr MidElement kMid = kOperands      ? MidElement::kF32
                                     : Format::kF16 ? MidElement::kF16
                                                    : MidElement::kBf16;
  static_assert(SPC % kStep == 0 && SPC % Format::kUnitSlabs == 0, "a chunk holds whole units");

  const DecodeArguments& args;
  const DecodeMap& map;
  const DecodePhase& f;
  const DecodeSegment& segment;
  uint8_t* const rows;
  float* const sums;  ///< F32 [warp][NT * 4][lane], of row blocks that warps share
  const uint32_t tag;
  const int zero_row, warp, lane, r, q;

  // The list at hand.
  int list = 0, block = 0, chunk = 0;
  int count = 0, first_row = 0;
  int whole_chunks = 0, chunks = 0;  ///< that the row blocks at hand have: of SPC slabs, and with the tail
  const uint8_t* x[NT];
  // What the epilogues of a list want, loaded when the list is opened: at the end of a row block they would
  // be a chain of latencies.
  float list_scale[2] = {}, factor[NT][2];
  int list_to[NT][2];  ///< where this lane's two columns go: elements of mid, or of partial
  int groups[NT][2];   ///< kTokenGroups: where the scales of those columns stand
  float acc[NT][4] = {};
  float odd[NT][4] = {};  ///< even and odd k-steps: two chains of MMAs

  __device__ __forceinline__ int RowOf(int n) const {  // staged row of the list's token n
    const int l = f.splits.Div(segment.list0 + list);
    return n >= count         ? zero_row
           : segment.by_token ? segment.routes_per_row.Div(map.route_of[map.list_first[l] + n])
                              : first_row + n;
  }
  /// The scale of a token's row, where rows have one.
  __device__ __forceinline__ float RowScale(int n) const {
    return *reinterpret_cast<const float*>(rows + RowOf(min(n, count - 1)) * segment.stride + f.split_k * 2);
  }

  __device__ __forceinline__ void OpenList() {
    const int l = f.splits.Div(segment.list0 + list), split = segment.list0 + list - l * f.splits.divisor;
    count = map.list_count[l];
    const int end = f.total_chunks - split * f.chunks.divisor;  // chunks from this split's first on
    chunks = min(f.chunks.divisor, end);
    whole_chunks = end <= f.chunks.divisor && f.tail_slabs < SPC ? end - 1 : chunks;
    const bool down = segment.phase == 1;
#pragma unroll
    for (int t = 0; t < NT; ++t) {
      x[t] = rows + RowOf(r + 8 * t) * segment.stride + q * 32;
      const int first = map.list_first[l];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int n = 8 * t + 2 * q + c;
        const int route = map.route_of[first + min(n, count - 1)];
        list_to[t][c] =
            down ? (route * f.splits.divisor + split) * args.partial_stride : route * args.mid_stride;
        factor[t][c] = 1.0F;
        if (down && args.topk_weights != nullptr) {
          factor[t][c] = __ldg(args.topk_weights + route);
        }
        if (kOperands && !down && args.row_scales) {
          factor[t][c] = RowScale(n);
        }
        if constexpr (kTokenGroups) {
          groups[t][c] = RowOf(n) * segment.stride + f.split_k * 2 + 16;
        }
      }
    }
    const int expert = map.list_expert[l], parts = !down && args.gated ? 2 : 1;
    list_scale[0] = __ldg(f.tensor_scale + expert * parts);
    list_scale[1] = __ldg(f.tensor_scale + expert * parts + parts - 1);
  }
  /// What sums of a part are multiplied with. Not where a list is opened: the multiplication would wait for
  /// the load there (INT4, one token of qwen3-30b-a3b: 1.1 us).
  __device__ __forceinline__ float ListScale(int part) const {
    return kRaw ? list_scale[part] * Format::kRawSums : list_scale[part];
  }

  /// What follows the products of a row block. It comes after every third chunk where K of down is 768: with
  /// the questions of the general one it was 4 % of qwen3-30b-a3b at M=8 and 64.
  __device__ __forceinline__ void PlainEpilogue() {
#pragma unroll
    for (int t = 0; t < NT; ++t) {
      if (8 * t >= count) {
        break;
      }
      const bool there[2] = {8 * t + 2 * q < count, 8 * t + 2 * q + 1 < count};
      if (segment.phase == 1) {
        float* const to = args.partial + kFragmentRows * block + r;
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          if (there[c]) {
            const float scale = ListScale(0) * factor[t][c];
            SendPartial(to + list_to[t][c], acc[t][c] * scale);
            SendPartial(to + list_to[t][c] + 8, acc[t][c + 2] * scale);
          }
        }
        continue;
      }
      float value[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        value[c] = FastSwish(acc[t][c] * ListScale(0), 1.0F) * (acc[t][c + 2] * ListScale(1));
      }
      HandOver(t, there, static_cast<int>(IntermediateColumn(block, r)), value[0], value[1]);
    }
  }

  __device__ __forceinline__ void Epilogue() {
    if (args.plain) {
      PlainEpilogue();
      return;
    }
    const bool down = segment.phase == 1;
    const int l = f.splits.Div(segment.list0 + list), split = segment.list0 + list - l * f.splits.divisor;
    const int expert = map.list_expert[l];
    const bool gated = !down && args.gated;
    const int parts = gated ? 2 : 1;
    // Rows r and r + 8 of the block: which part, which row of the matrix.
    const int row_a = down    ? kFragmentRows * block + r
                      : gated ? static_cast<int>(IntermediateColumn(block, r))
                              : static_cast<int>(IntermediateColumn(2 * block, r));
    const int row_b = down    ? row_a + 8
                      : gated ? row_a
                              : static_cast<int>(IntermediateColumn(2 * block + 1, r));
    float scale_a = ListScale(0), scale_b = ListScale(1);
    const int64_t at_a = static_cast<int64_t>(expert) * parts * f.padded_rows + row_a;
    const int64_t at_b = static_cast<int64_t>(expert * parts + parts - 1) * f.padded_rows + row_b;
    float bias_a = 0, bias_b = 0;
    if (f.row_scale != nullptr) {
      scale_a *= __ldg(f.row_scale + at_a);
      scale_b *= __ldg(f.row_scale + at_b);
    }
    if (f.bias != nullptr && split == 0) {
      bias_a = __ldg(f.bias + at_a);
      bias_b = __ldg(f.bias + at_b);
    }
#pragma unroll
    for (int t = 0; t < NT; ++t) {
      if (8 * t >= count) {
        break;
      }
      const bool there[2] = {8 * t + 2 * q < count, 8 * t + 2 * q + 1 < count};
      float value[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        float scale = c < 2 ? scale_a : scale_b;
        if (kOperands && !down) {
          scale *= factor[t][c % 2];
        } else if (kOperands && args.row_scales) {
          scale *= RowScale(8 * t + 2 * q + c % 2);
        }
        value[c] = acc[t][c] * scale + (c < 2 ? bias_a : bias_b);
      }
      if (down) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          if (there[c] && row_a < args.partial_cols) {
            SendPartial(args.partial + list_to[t][c] + row_a, value[c] * factor[t][c]);
          }
          if (there[c] && row_a + 8 < args.partial_cols) {
            SendPartial(args.partial + list_to[t][c] + row_a + 8, value[c + 2] * factor[t][c]);
          }
        }
        continue;
      }
      if (args.plain_silu) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          value[c] = FastSwish(value[c], 1.0F) * value[c + 2];
        }
      } else {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          value[c] = ActivateAny(args.activation, value[c], gated ? value[c + 2] : 0.0F);
          if (!gated) {
            value[c + 2] = ActivateAny(args.activation, value[c + 2], 0.0F);
          }
        }
      }
      HandOver(t, there, row_a, value[0], value[1]);
      if (!gated) {
        HandOver(t, there, row_b, value[2], value[3]);
      }
    }
  }

  /// Even and odd k-steps together.
  __device__ __forceinline__ void Fold() {
    if constexpr (!kGrouped) {
#pragma unroll
      for (int t = 0; t < NT; ++t) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          acc[t][j] += odd[t][j], odd[t][j] = 0.0F;
        }
      }
    }
  }
  __device__ __forceinline__ void Clear() {
#pragma unroll
    for (int t = 0; t < NT; ++t) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        acc[t][j] = 0.0F;
      }
    }
  }
  /// To the warp that has the row block's first chunk, and from those that have the others.
  __device__ __forceinline__ void PutSums() const {
#pragma unroll
    for (int t = 0; t < NT; ++t) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        sums[(warp * NT * 4 + t * 4 + c) * 32 + lane] = acc[t][c];
      }
    }
  }
  __device__ __forceinline__ void AddSums(int from) {
#pragma unroll
    for (int t = 0; t < NT; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        acc[t][i] += sums[(from * NT * 4 + t * 4 + i) * 32 + lane];
      }
    }
  }

  /// The slabs of a chunk that has come. `whole`: it has SPC of them.
  __device__ __forceinline__ void MultiplyChunk(const uint8_t* units, bool whole) {
    const auto slabs = [&](auto nt_constant) {
      if (whole && Format::kMayAdd && args.many_bytes) {
#pragma unroll
        for (int s = 0; s < SPC; s += kStep) {
          Multiply<decltype(nt_constant)::value, Format::kMayAdd>(units, s);
        }
      } else if (whole) {
#pragma unroll
        for (int s = 0; s < SPC; s += kStep) {
          Multiply<decltype(nt_constant)::value>(units, s);
        }
      } else {
#pragma unroll 1
        for (int s = 0; s < f.tail_slabs; s += kStep) {
          Multiply<decltype(nt_constant)::value>(units, s);
        }
      }
    };
    if (NT == 1 || count <= 8) {
      slabs(std::integral_constant<int, 1>{});
    } else {
      slabs(std::integral_constant<int, NT>{});
    }
  }

 private:
  __device__ __forceinline__ void HandOver(int t, const bool (&there)[2], int column, float first,
                                           float second) {
    if constexpr (kOperands) {
      if (args.quantizer.dynamic_tensor_scale) {
        const float values[2] = {first, second};
        uint32_t amax = 0;
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const uint32_t bits = __float_as_uint(values[c]) & 0x7fffffffU;
          amax = max(amax, there[c] && column < args.source[1].cols && bits < 0x7f800000U ? bits : 0U);
        }
        NoteMidAmax(args, tag, amax);
      }
    }
    if (args.tagged_mid) {
      SendMid<kMid>(args, tag, list_to[t], there, column, first, second);
      return;
    }
    if (there[0]) {
      PutMid<kMid>(args, list_to[t][0] + column, first);
    }
    if (there[1]) {
      PutMid<kMid>(args, list_to[t][1] + column, second);
    }
  }

  /// kStep slabs from slab `s` of the chunk, for the first nt * 8 tokens of the list. kAdds: of Expand.
  template <int nt, bool kAdds = false>
  __device__ __forceinline__ void Multiply(const uint8_t* units, int s) {
    [[maybe_unused]] float group[nt][4];
    [[maybe_unused]] LaneScales scales;
    [[maybe_unused]] float half_scale[2][2];
#pragma unroll
    for (int i = 0; i < kStep; ++i) {
      typename Format::Codes codes;
      Format::LoadCodes(units, s + i, lane, codes);
      if constexpr (kHalves) {
        Format::template LoadHalves<kAdds>(units, s + i, lane, scales, half_scale);
      } else if (i == 0) {
        Format::template LoadScales<false, kAdds>(units, s + i, lane, args.half_is_f16, scales);
      }
      uint4 b[nt][2];
#pragma unroll
      for (int t = 0; t < nt; ++t) {
        const uint8_t* from = x[t] + (chunk * SPC + s + i) * 128;
        b[t][0] = *reinterpret_cast<const uint4*>(from);
        b[t][1] = *reinterpret_cast<const uint4*>(from + 16);
      }
      if constexpr (kGrouped) {
        if (i == 0) {
#pragma unroll
          for (int t = 0; t < nt; ++t) {
#pragma unroll
            for (int c = 0; c < 4; ++c) {
              group[t][c] = odd[t][c] = 0.0F;
            }
          }
        }
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t a[4];
        Format::template Expand<false, kHalves, kRaw, kAdds>(codes, j, scales, a);
#pragma unroll
        for (int t = 0; t < nt; ++t) {
          const uint4& v = b[t][j / 2];
          const uint32_t b0 = j % 2 != 0 ? v.z : v.x, b1 = j % 2 != 0 ? v.w : v.y;
          if constexpr (kHalves) {
            const bool second = q >= 2;
            Mma16816<Format::kF16>(group[t], a, second ? 0 : b0, second ? 0 : b1);
            Mma16816<Format::kF16>(odd[t], a, second ? b0 : 0, second ? b1 : 0);
          } else {
            float(&sum)[4] = *(j % 2 != 0 ? &odd[t] : kGrouped ? &group[t] : &acc[t]);
            Mma16816<Format::kF16>(sum, a, b0, b1);
          }
        }
      }
    }
    if constexpr (kGrouped) {  // multiply and add once a group, in fp32
#pragma unroll
      for (int t = 0; t < nt; ++t) {
        float token[2] = {1.0F, 1.0F};
        if constexpr (kTokenGroups) {
          if (f.group_bytes != 0) {
#pragma unroll
            for (int c = 0; c < 2; ++c) {
              token[c] = *reinterpret_cast<const float*>(rows + groups[t][c] + (chunk * SPC + s) / 2 * 4);
            }
          }
        }
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          if constexpr (kHalves) {
            acc[t][c] += group[t][c] * half_scale[0][c / 2] + odd[t][c] * half_scale[1][c / 2];
          } else {
            acc[t][c] += (group[t][c] + odd[t][c]) * (scales.row[c / 2] * token[c % 2]);
          }
        }
      }
    }
  }
};

}  // namespace fusedmoe::cuda
