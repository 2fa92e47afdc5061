#include <algorithm>
#include <utility>

#include "fragment_case.hpp"
#include "support/stored_integers.hpp"
#include "weights/fragment_stager.hpp"
#include "weights/narrow.hpp"

/// Experts in pieces, as uploads stage and arrange them.
namespace fusedmoe::fragment_test {
namespace {

template <FragmentFormat kFormat>
void ArrangeAs(const StagedRows& staged, const FragmentPiece& piece, const FragmentPlaces& places,
               uint8_t* matrix) {
  const int64_t slabs = int64_t{staged.code_bytes} * 8 / FragmentTraitsOf(kFormat).code_bits / kFragmentSlab;
  for (int64_t b = 0; b < piece.blocks; ++b) {
    for (int64_t slab = 0; slab < slabs; ++slab) {
      for (int lane = 0; lane < 32; ++lane) {
        ArrangeSlab<kFormat>(staged, b, slab, lane, places, piece.first_block + b, matrix);
      }
    }
  }
}

void Arrange(FragmentFormat format, const StagedRows& staged, const FragmentPiece& piece,
             const FragmentPlaces& places, uint8_t* matrix) {
  switch (format) {
#define FMOE_ARRANGE_CASE(id, name, code, bits, scale, group) \
  case FragmentFormat::id:                                    \
    return ArrangeAs<FragmentFormat::id>(staged, piece, places, matrix);
    FMOE_FRAGMENT_FORMATS(FMOE_ARRANGE_CASE)
#undef FMOE_ARRANGE_CASE
  }
}

/// Whatever K is: copies that begin inside a line of memory are slower.
TEST(Fragment, ScalesApart_UnitsAndMatricesBeginOnLines) {
  for (const auto& [blocks, cols] : {std::pair{3, 128}, {360, 2880}, {446, 256}}) {
    const FragmentPlaces places = FragmentPlacesOf(FragmentFormat::kFp8Block, blocks, cols);
    const int64_t units = (cols + 127) / 128;
    const int64_t codes = blocks * units * 2048;
    EXPECT_EQ(places.Codes(1), units * 2048);
    EXPECT_EQ(places.Scales(3), codes) << "four row blocks have the same";
    EXPECT_EQ(places.Scales(4), codes + units * 16);
    EXPECT_EQ(places.bytes, (codes + (blocks + 3) / 4 * units * 16 + 127) / 128 * 128);
  }
  const FragmentPlaces together = FragmentPlacesOf(FragmentFormat::kNvfp4, 3, 128);
  EXPECT_EQ(together.Codes(2), 2 * 2 * 576);
  EXPECT_EQ(together.Scales(2), 2 * 2 * 576 + 512);
  EXPECT_EQ(together.bytes, 3 * 2 * 576);
}

/// As an upload does it: staged one behind the other, then arranged.
TEST(Fragment, Pieces_ArrangeToTheBlocksOfTheExpert) {
  for (const Case& c : Cases()) {
    std::mt19937 generator(41);
    const CanonicalExpert expert = RandomExpert(c, 384, 320, true, generator);
    const FragmentSpec spec = *ChooseFragmentSpec(expert.up.format, c.zero_points);
    Packed packed = Allocate(spec, 384, 320, true);
    ASSERT_TRUE(PackFragmentExpert(expert, spec, packed.view()).ok()) << c.scheme;
    const auto stager = FragmentStager::Create(expert, spec);
    ASSERT_TRUE(stager.ok());
    const int64_t fewest = FragmentStager::FewestBytes(spec, 384, 320, true);
    for (const int64_t bytes : {fewest, 5 * fewest / 2, int64_t{1} << 30}) {
      std::vector<uint8_t> gate_up(packed.gate_up.size(), 0xee), down(packed.down.size(), 0xee);
      std::vector<int64_t> nan_rows;
      for (const FragmentPiece& piece : stager->Cut(bytes)) {
        ASSERT_LE(stager->StagedBytes(piece), bytes) << c.scheme;
        std::vector<uint32_t> buffer(static_cast<size_t>(stager->StagedBytes(piece)) / 4);
        auto* staged = reinterpret_cast<uint8_t*>(buffer.data());
        stager->Stage(piece, staged, nan_rows);
        const bool is_down = piece.part == FragmentPart::kDown;
        Arrange(stager->FormatOf(piece), stager->View(piece, staged), piece, stager->PlacesOf(piece),
                (is_down ? down : gate_up).data());
      }
      EXPECT_EQ(gate_up, packed.gate_up) << c.scheme << " " << bytes;
      EXPECT_EQ(down, packed.down) << c.scheme << " " << bytes;
    }
    EXPECT_EQ(stager->Cut(int64_t{1} << 30).size(), 2U) << c.scheme << ": one a GEMM";
  }
}

/// Gate and up in fewer bits than down: the blocks of two layers, one of either format.
void ExpectBlocksOfEach(const StoredIntegers& stored, FragmentFormat gate_up_format) {
  const Case bytes{"int8_w8a16:g16", FragmentFormat::kInt8Offset16, true, DType::kF32, true};
  std::mt19937 generator(43);
  CanonicalExpert wide = RandomExpert(bytes, 384, 320, true, generator);
  for (CanonicalMatrix* matrix : {&wide.gate, &wide.up, &wide.down}) {
    matrix->format.block_scale_dtype = DType::kF32;
    matrix->block_scale = RandomFloats(DType::kF32, matrix->block_scale.shape(), generator, 0.01F, 0.02F);
    testing_support::StoreAs(stored, *matrix);
  }
  CanonicalExpert four = wide, mixed = wide;
  for (const auto matrix : {&CanonicalExpert::gate, &CanonicalExpert::up, &CanonicalExpert::down}) {
    const Result<CanonicalMatrix> narrow = Narrow(wide.*matrix);
    ASSERT_TRUE(narrow.ok()) << narrow.status().ToString();
    four.*matrix = *narrow;
  }
  mixed.gate = four.gate, mixed.up = four.up;
  FragmentSpec both = *ChooseFragmentSpec(wide.up.format, true);
  Packed of_bytes = Allocate(both, 384, 320, true);
  ASSERT_TRUE(PackFragmentExpert(wide, both, of_bytes.view()).ok());
  both.own_gate_up = gate_up_format;
  ASSERT_EQ(*ChooseFragmentSpec(four.up.format, stored.zero_points), both.OfGateUp());
  Packed of_four = Allocate(both.OfGateUp(), 384, 320, true), packed = Allocate(both, 384, 320, true);
  ASSERT_TRUE(PackFragmentExpert(four, both.OfGateUp(), of_four.view()).ok());
  ASSERT_TRUE(PackFragmentExpert(mixed, both, packed.view()).ok());
  EXPECT_EQ(packed.gate_up, of_four.gate_up);
  EXPECT_EQ(packed.gate_up_tensor, of_four.gate_up_tensor);
  EXPECT_EQ(packed.gate_up_bias, of_four.gate_up_bias);
  EXPECT_EQ(packed.down, of_bytes.down);
  EXPECT_EQ(packed.down_tensor, of_bytes.down_tensor);
  EXPECT_EQ(UnpackFragmentExpert(both, packed.view(), mixed).code(), StatusCode::kUnsupported);
  const auto stager = FragmentStager::Create(mixed, both);
  ASSERT_TRUE(stager.ok());
  const int64_t fewest = FragmentStager::FewestBytes(both, 384, 320, true);
  for (const int64_t most : {fewest, 3 * fewest}) {
    std::vector<uint8_t> gate_up(packed.gate_up.size(), 0xee), down(packed.down.size(), 0xee);
    std::vector<int64_t> nan_rows;
    for (const FragmentPiece& piece : stager->Cut(most)) {
      ASSERT_LE(stager->StagedBytes(piece), most);
      std::vector<uint32_t> buffer(static_cast<size_t>(stager->StagedBytes(piece)) / 4);
      auto* staged = reinterpret_cast<uint8_t*>(buffer.data());
      stager->Stage(piece, staged, nan_rows);
      const bool is_down = piece.part == FragmentPart::kDown;
      EXPECT_EQ(stager->FormatOf(piece), is_down ? both.format : both.gate_up_format());
      Arrange(stager->FormatOf(piece), stager->View(piece, staged), piece, stager->PlacesOf(piece),
              (is_down ? down : gate_up).data());
    }
    EXPECT_EQ(gate_up, packed.gate_up) << most;
    EXPECT_EQ(down, packed.down) << most;
  }
}

TEST(Fragment, TwoFormats_ArrangeToTheBlocksOfEach) {
  ExpectBlocksOfEach(testing_support::StoredWithMinima(4, 32), FragmentFormat::kInt4Offset32);
  StoredIntegers iq4 = testing_support::StoredAroundCenter(4, 32);
  iq4.center = 128;
  iq4.codebook = Codebook::kIq4;
  ExpectBlocksOfEach(iq4, FragmentFormat::kIq4);
}

/// Pieces of any size arrange to the same blocks.
TEST(Fragment, Pieces_CoverEveryBlockOnce) {
  for (const Case& c : Cases()) {
    for (const bool gated : {true, false}) {
      std::mt19937 generator(37);
      const CanonicalExpert expert = RandomExpert(c, 384, 256, gated, generator);
      const FragmentSpec spec = *ChooseFragmentSpec(expert.up.format, c.zero_points);
      const auto stager = FragmentStager::Create(expert, spec);
      ASSERT_TRUE(stager.ok());
      const FragmentSizes sizes = FragmentSizesOf(spec, 384, 256, gated);
      for (const int64_t bytes : {int64_t{0}, int64_t{40} << 10, int64_t{1} << 30}) {
        int64_t at[2] = {0, 0};
        for (const FragmentPiece& piece : stager->Cut(bytes)) {
          const bool down = piece.part == FragmentPart::kDown;
          EXPECT_EQ(piece.first_block, at[down ? 1 : 0]) << c.scheme;
          at[down ? 1 : 0] += piece.blocks;
          EXPECT_EQ(stager->PlacesOf(piece).bytes, down ? sizes.down_bytes : sizes.gate_up_bytes) << c.scheme;
          EXPECT_LE(stager->StagedBytes(piece),
                    std::max(bytes, FragmentStager::FewestBytes(spec, 384, 256, gated)))
              << c.scheme;
        }
        EXPECT_EQ(at[0], GateUpBlocks(256, gated)) << c.scheme << " " << bytes;
        EXPECT_EQ(at[1], DownBlocks(384)) << c.scheme << " " << bytes;
      }
    }
  }
}

}  // namespace
}  // namespace fusedmoe::fragment_test
