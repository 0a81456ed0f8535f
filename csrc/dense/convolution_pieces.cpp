#include "dense/convolution_pieces.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <numeric>
#include <optional>

#include "base/numbers.h"
#include "threads/tasks.h"

namespace popsim::dense {
namespace {

// The number of multiplications that a piece should have: starting one takes
// microseconds.
constexpr int64_t kPieceWork = 1 << 24;
// Smaller pieces pay off for a few threads, and even smaller ones for two.
constexpr int64_t kSmallPieceWork = 1 << 21;
constexpr int64_t kFewPieces = 4;
// The smallest number of terms in the sums of a piece: adding the results of
// two pieces takes as long as a dozen multiplications.
constexpr int64_t kMinTerms = 512;
constexpr int64_t kMaxSums = 8;
// The smallest number of channels in a slice of the output, and of rows in a
// band.
constexpr int64_t kMinChannels = 32;
constexpr int64_t kMinRows = 4;

int64_t product(const Extents& values) {
  return std::accumulate(values.begin(), values.end(), int64_t{1},
                         std::multiplies<>());
}

// Returns a power of two, so that two, four or eight threads get the same
// number of pieces.
int64_t num_pieces(const ConvolutionSpec& spec) {
  const int64_t work = num_multiplications(spec);
  const int64_t least =
      std::min<int64_t>(threads::multiplications(work).threads, 2);
  const int64_t few =
      std::clamp<int64_t>(work / kSmallPieceWork, least, kFewPieces);
  return static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(
      std::clamp(work / kPieceWork, few, threads::Tasks::kMax))));
}

// A section of the first spatial axis: rows of the input and of the output, and
// the padding that replaces rows outside the input.
struct Band {
  threads::Range input;
  threads::Range output;
  int64_t before = 0;
  int64_t after = 0;
};

int64_t extent(const ConvolutionSpec& spec) {
  return spec.dilation[0] * (spec.kernel_size[0] - 1) + 1;
}

// Returns the rows of the input that some rows of the output are computed from.
// Empty if these rows depend only on padding.
std::optional<Band> band_of_output(const ConvolutionSpec& spec,
                                   threads::Range rows) {
  const int64_t first = rows.begin * spec.stride[0] - spec.padding[0];
  const int64_t last =
      (rows.end - 1) * spec.stride[0] - spec.padding[0] + extent(spec);
  Band band{.input = {std::max<int64_t>(first, 0),
                      std::min(last, spec.input_size[0])},
            .output = rows};
  if (band.input.size() <= 0) return std::nullopt;
  band.before = band.input.begin - first;
  band.after = last - band.input.end;
  return band;
}

// Returns the rows of the input, and all rows of the output that depend on
// them.
std::optional<Band> band_of_input(const ConvolutionSpec& spec,
                                  threads::Range rows) {
  const int64_t stride = spec.stride[0];
  const int64_t padding = spec.padding[0];
  const int64_t first = std::max<int64_t>(
      ceil_div(std::max<int64_t>(rows.begin + padding - extent(spec) + 1, 0),
               stride),
      0);
  const int64_t end =
      std::min((rows.end - 1 + padding) / stride + 1, spec.output_size[0]);
  Band band{.input = rows, .output = {first, end}};
  if (band.output.size() <= 0) return std::nullopt;
  band.before = rows.begin - (first * stride - padding);
  // This is negative if no output row reads the last rows.
  band.after = std::max<int64_t>(
      (end - 1) * stride - padding + extent(spec) - rows.end, 0);
  if (band.before < 0) return std::nullopt;
  return band;
}

// Divides the rows of the result into bands of equal size; returns one band of
// all rows if that is not possible.
std::vector<Band> cut_bands(const ConvolutionSpec& spec, ConvolutionPass pass,
                            int64_t count) {
  const bool of_input = pass == ConvolutionPass::kGradInput;
  const int64_t rows = of_input ? spec.input_size[0] : spec.output_size[0];
  count = std::clamp<int64_t>(std::min(count, rows / kMinRows), 1, count);
  std::vector<Band> bands;
  for (int64_t i = 0; i < count && count > 1; ++i) {
    const threads::Range part = threads::part(rows, i, count);
    const auto band =
        of_input ? band_of_input(spec, part) : band_of_output(spec, part);
    if (!band) return cut_bands(spec, pass, 1);
    bands.push_back(*band);
  }
  if (count == 1) {
    bands.push_back({.input = {0, spec.input_size[0]},
                     .output = {0, spec.output_size[0]},
                     .before = spec.padding[0],
                     .after = spec.padding[0]});
  }
  return bands;
}

class Cutter {
 public:
  Cutter(const ConvolutionSpec& spec, ConvolutionPass pass)
      : spec_(spec), pass_(pass) {}

  ConvolutionPieces cut() {
    int64_t count = num_pieces(spec_);
    if (pass_ == ConvolutionPass::kGradWeight) {
      const int64_t terms = spec_.batch * product(spec_.output_size);
      const auto sums = static_cast<int64_t>(std::bit_floor(
          static_cast<uint64_t>(std::max<int64_t>(terms / kMinTerms, 1))));
      const int64_t num_sums = std::min({count, sums, kMaxSums});
      if (spec_.groups == 1) {
        result_.num_slices = std::clamp<int64_t>(
            std::min(count / num_sums, spec_.out_channels / kMinChannels), 1,
            count);
      }
      count = num_sums;
    }
    cut_images(count);
    return std::move(result_);
  }

 private:
  void cut_images(int64_t count) {
    const int64_t num_groups = std::min(count, spec_.batch);
    const int64_t num_bands =
        num_groups == spec_.batch ? ceil_div(count, num_groups) : 1;
    const std::vector<Band> bands = cut_bands(spec_, pass_, num_bands);
    const bool sums = pass_ == ConvolutionPass::kGradWeight;
    if (sums) result_.num_sums = num_groups * std::ssize(bands);
    for (int64_t slice = 0; slice < result_.num_slices; ++slice) {
      const threads::Range channels =
          threads::part(spec_.out_channels, slice, result_.num_slices);
      int64_t sum = 0;
      for (int64_t group = 0; group < num_groups; ++group) {
        const threads::Range images =
            threads::part(spec_.batch, group, num_groups);
        // The rows of several images are not adjacent in memory.
        const bool whole = bands.size() == 1;
        for (int64_t image = images.begin; image < images.end; ++image) {
          for (const Band& band : bands) {
            add(whole ? images.size() : 1, image, band, channels);
            result_.pieces.back().slice = static_cast<size_t>(slice);
            if (sums) result_.pieces.back().sum = sum++;
          }
          if (whole) break;
        }
      }
    }
  }

  void add(int64_t num_images, int64_t image, const Band& band,
           threads::Range channels) {
    PieceShape shape{spec_, spec_.padding};
    shape.spec.batch = num_images;
    shape.spec.input_size[0] = band.input.size();
    shape.spec.output_size[0] = band.output.size();
    shape.spec.out_channels = channels.size();
    shape.spec.padding[0] = band.before;
    shape.padding_end[0] = band.after;
    const auto found = std::ranges::find(result_.shapes, shape);
    const auto index = static_cast<size_t>(found - result_.shapes.begin());
    if (found == result_.shapes.end()) result_.shapes.push_back(shape);
    result_.pieces.push_back({.shape = index,
                              .image = image,
                              .input_row = band.input.begin,
                              .output_row = band.output.begin,
                              .channel = channels.begin});
  }

  const ConvolutionSpec& spec_;
  ConvolutionPass pass_;
  ConvolutionPieces result_;
};

}  // namespace

int64_t num_multiplications(const ConvolutionSpec& spec) {
  return spec.batch * spec.out_channels * product(spec.output_size) *
         (spec.in_channels / std::max<int64_t>(spec.groups, 1)) *
         product(spec.kernel_size);
}

ConvolutionPieces cut_convolution(const ConvolutionSpec& spec,
                                  ConvolutionPass pass) {
  return Cutter(spec, pass).cut();
}

}  // namespace popsim::dense
