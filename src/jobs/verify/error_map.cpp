#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include <fusedmoe/jobs/verify.hpp>

namespace fusedmoe {
namespace {

constexpr double kSmallest = 1e-8, kLargest = 1.0;

// 0 at kSmallest, 1 at kLargest, by the logarithm; NaN and infinity count as largest.
double Level(double error) {
  if (error <= kSmallest) {
    return 0.0;
  }
  if (!(error < kLargest)) {
    return 1.0;
  }
  return std::log10(error / kSmallest) / std::log10(kLargest / kSmallest);
}

// White over orange to dark red: one hue, so that it reads in gray too.
std::string Color(double level) {
  const auto mix = [level](double low, double middle, double high) {
    const double value =
        level < 0.5 ? low + (middle - low) * 2 * level : middle + (high - middle) * (2 * level - 1);
    return static_cast<int>(std::lround(value));
  };
  return fmt::format("#{:02x}{:02x}{:02x}", mix(252, 244, 90), mix(252, 150, 10), mix(250, 80, 20));
}

std::string Text(double x, double y, const std::string& text) {
  return fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\">{}</text>\n", x, y, text);
}

}  // namespace

std::string ErrorMapSvg(const VerifyReport& report) {
  constexpr double kLeft = 60, kTop = 40, kCellX = 7, kRow = 12, kFigures = 50;
  const double map_height = static_cast<double>(report.map_rows) * kRow;
  const double map_width = std::max(static_cast<double>(report.map_cols) * kCellX, 420.0);
  const double bars_top = kTop + map_height + 50;
  const double height = bars_top + static_cast<double>(report.experts.size()) * kRow + 30;
  std::string svg = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{:.0f}\" height=\"{:.0f}\" "
      "font-family=\"sans-serif\" "
      "font-size=\"10\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n",
      kLeft + map_width + 20, height);
  svg += Text(10, 16,
              fmt::format("{} {}: relative L2 {:.2e}, worst token {:.2e}, bound {:.2e}", report.backend,
                          report.scheme, report.rel_l2, report.max_row_error, report.bound));
  svg += Text(10, 30,
              fmt::format("{} tokens downwards, hidden to the right; color from {:.0e} to {:.0f}",
                          report.rows, kSmallest, kLargest));
  for (int64_t row = 0; row < report.map_rows; ++row) {
    for (int64_t col = 0; col < report.map_cols; ++col) {
      const double error = report.error_map[static_cast<size_t>(row * report.map_cols + col)];
      svg += fmt::format("<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{}\" height=\"{}\" fill=\"{}\"/>\n",
                         kLeft + static_cast<double>(col) * kCellX, kTop + static_cast<double>(row) * kRow,
                         kCellX, kRow, Color(Level(error)));
    }
    if (report.map_rows <= 16 || row % 8 == 0) {
      svg += Text(10, kTop + static_cast<double>(row) * kRow + 9,
                  fmt::format("{}", row * report.rows / std::max<int64_t>(report.map_rows, 1)));
    }
  }
  svg += Text(10, bars_top - 10, "experts: relative L2 of their contributions");
  for (size_t index = 0; index < report.experts.size(); ++index) {
    const ExpertError& expert = report.experts[index];
    const double y = bars_top + static_cast<double>(index) * kRow;
    const double level = Level(expert.rel_l2), width = 2 + level * (map_width - kFigures);
    svg += fmt::format(
        "<rect x=\"{}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{}\" fill=\"{}\" stroke=\"#999\" "
        "stroke-width=\"0.5\"/>\n",
        kLeft, y, width, kRow - 2, Color(level));
    svg += Text(10, y + 9, fmt::format("{}", expert.expert));
    svg += Text(kLeft + width + 4, y + 9, fmt::format("{:.1e}", expert.rel_l2));
  }
  return svg + "</svg>\n";
}

}  // namespace fusedmoe
