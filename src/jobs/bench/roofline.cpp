#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include <fmt/format.h>
#include <fusedmoe/jobs/bench.hpp>

namespace fusedmoe {
namespace {

// The drawing area in pixels; room on the left and below for labels, on the right for the legend.
constexpr double kLeft = 76, kRight = 716, kTop = 28, kBottom = 484, kHeight = 540;
constexpr double kLetter = 7.2;     // the most that a letter of this size takes on the average
constexpr double kLineHeight = 14;  // of the labels of levels
constexpr const char* kPalette[] = {"#1b6ca8", "#c2452d", "#2e8b57", "#8e44ad", "#b8860b",
                                    "#008b8b", "#d6569b", "#555555", "#7a9a01", "#6b4423"};
// White around letters that stand on lines.
constexpr const char* kHalo = "paint-order=\"stroke\" stroke=\"#fff\" stroke-width=\"4\"";

/// One of the figures 1, 2 and 5 of each decade.
struct Tick {
  double value;
  bool decade;
};

/// From the last tick below `low` to the first above `high`.
std::vector<Tick> TicksOver(double low, double high) {
  std::vector<Tick> ticks;
  for (int exponent = static_cast<int>(std::floor(std::log10(low)));; ++exponent) {
    for (const int step : {1, 2, 5}) {
      const Tick tick{step * std::pow(10.0, exponent), step == 1};
      if (tick.value <= low) {
        ticks.clear();
      }
      ticks.push_back(tick);
      if (tick.value >= high && ticks.size() > 1) {
        return ticks;
      }
    }
  }
}

/// Logarithmic axes between two ticks.
struct Axes {
  std::vector<Tick> x_ticks, y_ticks;
  static double Place(const std::vector<Tick>& ticks, double value) {
    return std::log(value / ticks.front().value) / std::log(ticks.back().value / ticks.front().value);
  }
  double X(double value) const { return kLeft + Place(x_ticks, value) * (kRight - kLeft); }
  double Y(double value) const { return kBottom - Place(y_ticks, value) * (kBottom - kTop); }
};

std::string Escape(const std::string& text) {
  std::string out;
  for (const char letter : text) {
    switch (letter) {
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '&':
        out += "&amp;";
        break;
      case '"':
        out += "&quot;";
        break;
      default:  // XML has no place for control characters
        out += static_cast<unsigned char>(letter) < 0x20 ? ' ' : letter;
    }
  }
  return out;
}

std::string Line(double x1, double y1, double x2, double y2, std::string_view style) {
  return fmt::format("<line x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\" {}/>\n", x1, y1, x2, y2,
                     style);
}

std::string Text(double x, double y, std::string_view style, const std::string& text) {
  return fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" {}>{}</text>\n", x, y, style, Escape(text));
}

std::string Turned(double x, double y, double degrees, std::string_view style, const std::string& text) {
  return fmt::format("<text transform=\"translate({:.1f} {:.1f}) rotate({:.1f})\" {}>{}</text>\n", x, y,
                     degrees, style, Escape(text));
}

std::string Grid(const Axes& axes) {
  const auto style = [](const Tick& tick) { return tick.decade ? "stroke=\"#ccc\"" : "stroke=\"#eee\""; };
  std::string svg;
  for (const Tick& tick : axes.x_ticks) {
    const double x = axes.X(tick.value);
    svg += Line(x, kTop, x, kBottom, style(tick)) +
           Text(x, kBottom + 18, "text-anchor=\"middle\"", fmt::format("{:g}", tick.value));
  }
  for (const Tick& tick : axes.y_ticks) {
    const double y = axes.Y(tick.value);
    svg += Line(kLeft, y, kRight, y, style(tick)) +
           Text(kLeft - 8, y + 4, "text-anchor=\"end\"", fmt::format("{:.15g}", tick.value));
  }
  return svg +
         Text((kLeft + kRight) / 2, kBottom + 42, "text-anchor=\"middle\"",
              "operations per byte of weights") +
         Turned(18, (kTop + kBottom) / 2, -90, "text-anchor=\"middle\"", "billions of operations a second");
}

// The slanted roof of memory up to the highest unit, and a level for each unit: those that bind a row are
// drawn in full. Their names stand right of the drawing, one below the other where levels are close.
std::string Roofs(const BenchReport& report, const Axes& axes) {
  std::vector<BenchCeilings::Peak> peaks = report.ceilings.peaks;
  std::erase_if(peaks, [](const BenchCeilings::Peak& peak) { return !(peak.rate > 0); });
  std::sort(peaks.begin(), peaks.end(), [](const auto& a, const auto& b) { return a.rate > b.rate; });
  if (peaks.empty()) {
    return {};
  }
  std::set<std::string> binding;
  for (const BenchRow& row : report.rows) {
    binding.insert(row.bound);
  }
  const double gbps = report.ceilings.read / 1e9;
  std::string lines, labels;
  double last = 0;
  for (const BenchCeilings::Peak& peak : peaks) {
    const bool binds = binding.contains(peak.unit);
    const double y = axes.Y(peak.rate / 1e9);
    const double ridge = std::max(peak.rate / 1e9 / gbps, axes.x_ticks.front().value);
    lines += Line(axes.X(ridge), y, kRight, y,
                  binds ? "stroke=\"#333\" stroke-width=\"2\"" : "stroke=\"#888\" stroke-dasharray=\"6 3\"");
    last = std::max(y, last + kLineHeight);
    labels += Text(kRight + 6, last + 4, binds ? "" : "fill=\"#666\"", peak.unit);
  }
  const double low = std::max(axes.x_ticks.front().value, axes.y_ticks.front().value / gbps);
  const double high = std::min(peaks.front().rate / 1e9 / gbps, axes.x_ticks.back().value);
  const double x1 = axes.X(low), y1 = axes.Y(low * gbps), x2 = axes.X(high), y2 = axes.Y(high * gbps);
  lines += Line(x1, y1, x2, y2, "stroke=\"#333\" stroke-width=\"2\"");
  constexpr double kAlong = 0.8, kAbove = 8, kDegrees = 57.29577951;
  const double length = std::hypot(x2 - x1, y2 - y1);
  labels +=
      Turned(x1 + kAlong * (x2 - x1) + kAbove * (y2 - y1) / length,
             y1 + kAlong * (y2 - y1) - kAbove * (x2 - x1) / length, std::atan2(y2 - y1, x2 - x1) * kDegrees,
             "text-anchor=\"middle\"", fmt::format("read {:.1f} GB/s", gbps));
  return lines + labels;
}

/// The room that the names of the levels take.
double RoofWidth(const BenchReport& report) {
  size_t longest = 0;
  for (const BenchCeilings::Peak& peak : report.ceilings.peaks) {
    longest = std::max(longest, peak.unit.size());
  }
  return kLetter * static_cast<double>(longest);
}

bool Timed(const BenchRow& row) {
  return row.seconds.median > 0 && row.bytes > 0 && row.flops > 0;
}

/// What the legend calls the row: its instruction set too where the report compares several.
std::string SeriesOf(const BenchReport& report, const BenchRow& row) {
  const bool compared = std::any_of(report.rows.begin(), report.rows.end(), [&](const BenchRow& other) {
    return other.problem == row.problem && other.scheme == row.scheme && other.plan.isa != row.plan.isa;
  });
  return row.problem + " " + row.scheme + (compared ? " " + row.plan.isa : "");
}

Axes AxesOver(const BenchReport& report) {
  double low_x = INFINITY, high_x = 0, low_y = INFINITY, high_y = 0;
  for (const BenchRow& row : report.rows) {
    if (Timed(row)) {
      const double x = row.flops / row.bytes, y = row.flops_per_second() / 1e9;
      low_x = std::min(low_x, x);
      low_y = std::min(low_y, y);
      high_x = std::max(high_x, x);
      high_y = std::max(high_y, y);
    }
  }
  for (const BenchCeilings::Peak& peak : report.ceilings.peaks) {
    high_y = std::max(high_y, peak.rate / 1e9);
    high_x = std::max(high_x, report.ceilings.read > 0 ? 1.5 * peak.rate / report.ceilings.read : 1.0);
  }
  high_x = std::max(high_x, 1.0);
  high_y = std::max(high_y, 1.0);
  return {TicksOver(std::min(low_x, high_x), high_x), TicksOver(std::min(low_y, high_y), high_y)};
}

}  // namespace

std::string RooflineSvg(const BenchReport& report) {
  const Axes axes = AxesOver(report);
  struct Series {
    const char* color;
    double x = 0, y = 0;  // of its last row
    int64_t tokens = 0;
  };
  const double legend_x = kRight + 24 + RoofWidth(report);
  std::map<std::string, Series> all;
  std::string lines, marks, legend;
  size_t longest = 0;
  for (const BenchRow& row : report.rows) {
    if (!Timed(row)) {
      continue;
    }
    const std::string name = SeriesOf(report, row);
    const auto [place, added] = all.try_emplace(name, Series{kPalette[all.size() % std::size(kPalette)]});
    Series& series = place->second;
    if (added) {
      const double y = kTop + 18.0 * static_cast<double>(all.size()) - 4;
      legend += fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"4\" fill=\"{}\"/>\n", legend_x, y - 4,
                            series.color) +
                Text(legend_x + 10, y, "", name);
      longest = std::max(longest, name.size());
    }
    const double x = axes.X(row.flops / row.bytes), y = axes.Y(row.flops_per_second() / 1e9);
    if (row.tokens > series.tokens && series.tokens > 0) {  // else another mode begins
      lines +=
          Line(series.x, series.y, x, y, fmt::format("stroke=\"{}\" stroke-opacity=\"0.5\"", series.color));
    }
    series = {series.color, x, y, row.tokens};
    marks += fmt::format(
        "<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"4\" fill=\"{}\"><title>{}</title></circle>\n", x, y,
        series.color,
        Escape(fmt::format("{}, {} tokens, {} {}: {:.1f} GB/s, {:.1f} GFLOP/s, {:.0f} % of {}", name,
                           row.tokens, row.plan.isa, row.plan.mode, row.bytes_per_second() / 1e9,
                           row.flops_per_second() / 1e9, 100 * row.share_of_bound, row.bound)));
    marks += Text(x + 6, y + 12, fmt::format("font-size=\"10\" fill=\"{}\" {}", series.color, kHalo),
                  fmt::format("{}", row.tokens));
  }
  constexpr const char* kNote = "figures at the points: tokens";
  longest = std::max(longest, std::string_view(kNote).size());
  legend += Text(legend_x - 4, kTop + 18.0 * static_cast<double>(all.size() + 1), "fill=\"#666\"", kNote);
  const double height = std::max(kHeight, kTop + 18.0 * static_cast<double>(all.size() + 2));
  std::string svg = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0:.0f} {1:.0f}\" width=\"{0:.0f}\" "
      "height=\"{1:.0f}\" font-family=\"sans-serif\" font-size=\"12\">\n"
      "<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n",
      legend_x + 20 + kLetter * static_cast<double>(longest), height);
  svg += Grid(axes);
  if (report.ceilings.read > 0) {
    svg += Roofs(report, axes);
  }
  return svg + lines + marks + legend + "</svg>\n";
}

}  // namespace fusedmoe
