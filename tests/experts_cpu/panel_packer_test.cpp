#include "experts/cpu/panel_packer.hpp"

#include <cstring>

#include "cpu_layer.hpp"

namespace fusedmoe::cpu {
namespace {

/// Every scheme and awkward sizes, by every instruction set of this machine.
TEST(PanelPacker_EveryFormat, WritesTheBytesOfTheDefinition) {
  const char* const schemes[] = {
      "nvfp4_w4a16",        "nvfp4_w4a8:g32",  "mxfp4_w4a16",       "mxfp8_w8a16",        "w_mxfp6_e3m2",
      "int4_w4a16:g32",     "int4_w4a16:g64",  "int4_w4a16:g128",   "int4_w4a16:channel", "int4_w4a8:g128",
      "int8_w8a16:g32",     "int8_w8a16:g128", "int8_w8a8:channel", "int8_w8a8:block128", "fp8_w8a16:channel",
      "fp8_w8a16:block128", "unquantized"};
  const DType scale_types[] = {DType::kF16, DType::kBF16, DType::kF32};
  const std::pair<int64_t, int64_t> sizes[] = {{16, 128}, {37, 1152}, {130, 2944}};
  for (const char* name : schemes) {
    for (const auto& [rows, cols] : sizes) {
      for (const bool zero_points : {false, true}) {
        cpu_test::Layer layer;
        layer.spec.scheme = name;
        layer.scheme = *ParseScheme(name);
        if (layer.scheme.weight.block_scale_dtype == DType::kBF16) {
          layer.scheme.weight.block_scale_dtype = scale_types[rows % 3];
        }
        layer.spec.zero_points = zero_points && layer.scheme.weight.may_have_zero_point;
        if (!layer.scheme.weight.quantized()) {
          layer.spec.weight_dtype = zero_points ? DType::kF16 : DType::kBF16;
          layer.scheme.weight.element = layer.spec.weight_dtype;
        }
        std::mt19937 random(3);
        // Plain weights may end inside a unit of 64.
        const int64_t odd = layer.scheme.weight.quantized() ? 0 : 27;
        const CanonicalMatrix matrix = cpu_test::RandomMatrix(layer, rows, cols - odd, random);
        // Half of the matrices without zero points stand among others that have them.
        const bool planned =
            !matrix.zero_point.empty() || (layer.scheme.weight.may_have_zero_point && rows == 37);
        const PanelFormat format = *ChoosePanelFormat(matrix.format, planned);
        const std::vector<int32_t> columns = PanelColumns(matrix, format);
        const auto bytes =
            static_cast<size_t>(static_cast<int64_t>(columns.size()) / format.block * format.block_bytes());
        for (const std::string& isa : cpu_test::HostIsas()) {
          PanelPacker packer(matrix, format, columns, *FindKernelTable(*ParseIsa(isa)));
          std::vector<std::byte> expected(bytes, std::byte{0xa5});
          const Workspace memory = *Workspace::Allocate(static_cast<int64_t>(bytes));
          auto* actual = memory.Get<std::byte>(WorkspaceSlot{0, static_cast<int64_t>(bytes)});
          for (int64_t stripe = 0; stripe * kPanelRows < rows; ++stripe) {
            PackPanelStripe(matrix, format, columns, stripe, expected.data());
            std::memset(actual, 0x5a, bytes);
            packer.Pack(stripe, actual, stripe % 2 == 0 ? &packer : nullptr, stripe + 1);
            ASSERT_EQ(0, std::memcmp(expected.data(), actual, bytes))
                << name << " " << rows << " x " << cols << " stripe " << stripe << " with " << isa;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace fusedmoe::cpu
