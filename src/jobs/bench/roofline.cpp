#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>

#include <fmt/format.h>
#include <fusedmoe/jobs/bench.hpp>

namespace fusedmoe {
namespace {

// The drawing area in pixels; room on the left and below for labels, on the right for the legend.
constexpr double kLeft = 80, kRight = 700, kTop = 40, kBottom = 480, kWidth = 960, kHeight = 540;
constexpr const char* kColors[] = {"#1b6ca8", "#c2452d", "#2e8b57", "#8e44ad",
                                   "#b8860b", "#008b8b", "#555555"};

/// Logarithmic axes over whole decades.
struct Axes {
  double low_x = 0, high_x = 0, low_y = 0, high_y = 0;  // decades
  double X(double value) const {
    return kLeft + (std::log10(value) - low_x) / (high_x - low_x) * (kRight - kLeft);
  }
  double Y(double value) const {
    return kBottom - (std::log10(value) - low_y) / (high_y - low_y) * (kBottom - kTop);
  }
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
      default:
        out += letter;
    }
  }
  return out;
}

std::string Line(double x1, double y1, double x2, double y2, const char* stroke) {
  return fmt::format("<line x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\" {}/>\n", x1, y1, x2, y2,
                     stroke);
}

std::string Text(double x, double y, const char* anchor, const std::string& text) {
  return fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\">{}</text>\n", x, y, anchor,
                     Escape(text));
}

std::string Decade(double exponent) {
  return exponent < 0 ? fmt::format("{:g}", std::pow(10.0, exponent))
                      : fmt::format("{:.0f}", std::pow(10.0, exponent));
}

std::string Grid(const Axes& axes) {
  std::string svg;
  for (double x = axes.low_x; x <= axes.high_x; ++x) {
    const double at = axes.X(std::pow(10.0, x));
    svg += Line(at, kTop, at, kBottom, "stroke=\"#ddd\"") + Text(at, kBottom + 18, "middle", Decade(x));
  }
  for (double y = axes.low_y; y <= axes.high_y; ++y) {
    const double at = axes.Y(std::pow(10.0, y));
    svg += Line(kLeft, at, kRight, at, "stroke=\"#ddd\"") + Text(kLeft - 8, at + 4, "end", Decade(y));
  }
  return svg + Text((kLeft + kRight) / 2, kBottom + 42, "middle", "operations per byte of weights") +
         Text(kLeft, kTop - 14, "start", "billions of operations a second");
}

// The slanted roof of memory up to the highest unit, and a level for each unit.
std::string Roofs(const BenchCeilings& ceilings, const Axes& axes) {
  std::string svg;
  double highest = 0;
  for (const BenchCeilings::Peak& peak : ceilings.peaks) {
    highest = std::max(highest, peak.rate);
    const double ridge = std::max(peak.rate / ceilings.read, std::pow(10.0, axes.low_x));
    const double y = axes.Y(peak.rate / 1e9);
    svg += Line(axes.X(ridge), y, kRight, y, "stroke=\"#888\" stroke-dasharray=\"6 3\"") +
           Text(kRight - 4, y - 4, "end", peak.unit);
  }
  if (highest == 0) {
    return svg;
  }
  const double low = std::max(std::pow(10.0, axes.low_x), std::pow(10.0, axes.low_y) * 1e9 / ceilings.read);
  const double high = std::min(highest / ceilings.read, std::pow(10.0, axes.high_x));
  return svg +
         Line(axes.X(low), axes.Y(low * ceilings.read / 1e9), axes.X(high),
              axes.Y(high * ceilings.read / 1e9), "stroke=\"#333\" stroke-width=\"2\"") +
         Text(axes.X(low) + 6, axes.Y(low * ceilings.read / 1e9) - 10, "start",
              fmt::format("read {:.1f} GB/s", ceilings.read / 1e9));
}

}  // namespace

std::string RooflineSvg(const BenchReport& report) {
  Axes axes{0, 1, 0, 1};
  double low_x = 1, high_x = 10, low_y = 1e9, high_y = 1e10;
  bool first = true;
  for (const BenchRow& row : report.rows) {
    if (row.seconds.median > 0 && row.bytes > 0) {
      const double x = row.flops / row.bytes, y = row.flops_per_second();
      low_x = first ? x : std::min(low_x, x);
      low_y = first ? y : std::min(low_y, y);
      high_x = first ? x : std::max(high_x, x);
      high_y = first ? y : std::max(high_y, y);
      first = false;
    }
  }
  for (const BenchCeilings::Peak& peak : report.ceilings.peaks) {
    high_y = std::max(high_y, peak.rate);
    high_x = std::max(high_x, report.ceilings.read > 0 ? peak.rate / report.ceilings.read : 1.0);
  }
  axes.low_x = std::floor(std::log10(low_x));
  axes.high_x = std::max(axes.low_x + 1, std::ceil(std::log10(high_x)));
  axes.low_y = std::floor(std::log10(low_y / 1e9));
  axes.high_y = std::max(axes.low_y + 1, std::ceil(std::log10(high_y / 1e9)));

  std::string svg = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" width=\"{0}\" height=\"{1}\" "
      "font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"{0}\" height=\"{1}\" fill=\"#fff\"/>\n",
      kWidth, kHeight);
  svg += Grid(axes);
  if (report.ceilings.read > 0) {
    svg += Roofs(report.ceilings, axes);
  }
  std::map<std::string, const char*> colors;  // by what the legend names
  for (const BenchRow& row : report.rows) {
    if (!(row.seconds.median > 0 && row.bytes > 0)) {
      continue;
    }
    const std::string series = row.problem + " " + row.scheme;
    const auto [place, added] = colors.try_emplace(series, kColors[colors.size() % std::size(kColors)]);
    if (added) {
      const double y = kTop + 16.0 * static_cast<double>(colors.size());
      svg += fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"4\" fill=\"{}\"/>\n", kRight + 16, y - 4,
                         place->second) +
             Text(kRight + 26, y, "start", series);
    }
    svg += fmt::format(
        "<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"4\" fill=\"{}\"><title>{}</title></circle>\n",
        axes.X(row.flops / row.bytes), axes.Y(row.flops_per_second() / 1e9), place->second,
        Escape(fmt::format("{}, {} tokens, {} {}: {:.1f} GB/s, {:.1f} GFLOP/s, {:.0f} % of {}", series,
                           row.tokens, row.plan.isa, row.plan.mode, row.bytes_per_second() / 1e9,
                           row.flops_per_second() / 1e9, 100 * row.share_of_bound, row.bound)));
  }
  return svg + "</svg>\n";
}

}  // namespace fusedmoe
