#include "dense/tile/image.h"

#include <algorithm>
#include <utility>

#include "base/numbers.h"

namespace popsim::dense {
namespace {

Point to_point(const Extents& extents, int64_t missing) {
  Point point;
  point.fill(missing);
  std::ranges::copy_backward(extents, point.end());
  return point;
}

// The sizes of a convolution along three axes.
struct Axes {
  explicit Axes(const ConvolutionSpec& spec)
      : input(to_point(spec.input_size, 1)),
        kernel(to_point(spec.kernel_size, 1)),
        output(to_point(spec.output_size, 1)),
        stride(to_point(spec.stride, 1)),
        padding(to_point(spec.padding, 0)),
        dilation(to_point(spec.dilation, 1)),
        band(input.size() - spec.input_size.size()) {}

  Point input;
  Point kernel;
  Point output;
  Point stride;
  Point padding;
  Point dilation;
  size_t band;
};

int64_t flat(const Point& point, const Point& size) {
  return (point[0] * size[1] + point[1]) * size[2] + point[2];
}

// The positions of a phase that are inside the image: from `first` to `last`.
struct Range {
  int64_t first;
  int64_t last;
};

// Position i of a phase is position i * phases + start of the image.
Range inside(int64_t start, int64_t size, int64_t phases, int64_t extent) {
  const auto first_from = [&](int64_t position) {
    const int64_t distance = std::max<int64_t>(position - start, 0);
    return std::min(ceil_div(distance, phases), extent);
  };
  return {first_from(0), first_from(size)};
}

}  // namespace

int64_t PackedImage::offset(const Tap& tap) const {
  return (flat(tap.phase, phases) * phase_positions() + position(tap.shift)) *
         kStepDepth;
}

int64_t PackedImage::reach(const Point& count) const {
  if (std::ranges::any_of(count, [](int64_t n) { return n <= 0; })) return 0;
  return position({count[0] - 1, count[1] - 1, count[2] - 1}) + 1;
}

int64_t ImageProducts::num_rows() const {
  int64_t rows = 0;
  for (const Lattice& lattice : lattices) {
    rows = std::max(rows, lattice.count[source.band_axis]);
  }
  return rows;
}

void ImageProducts::cut(int64_t num_rows) {
  const size_t axis = source.band_axis;
  source.extent[axis] = num_rows;
  for (const Lattice& lattice : lattices) {
    const int64_t rows = std::min(num_rows, lattice.count[axis]);
    for (const Tap& tap : lattice.taps) {
      source.extent[axis] =
          std::max(source.extent[axis], rows + tap.shift[axis]);
    }
  }
}

ImageProducts forward_products(const ConvolutionSpec& spec) {
  const Axes axes(spec);
  Lattice lattice{
      .first = {0, 0, 0}, .step = {1, 1, 1}, .count = axes.output, .taps = {}};
  for_each_point(axes.kernel, [&](const Point& k) {
    Tap tap{.index = flat(k, axes.kernel), .phase = {}, .shift = {}};
    for (size_t i = 0; i < k.size(); ++i) {
      const int64_t distance = k[i] * axes.dilation[i];
      tap.phase[i] = distance % axes.stride[i];
      tap.shift[i] = distance / axes.stride[i];
    }
    lattice.taps.push_back(tap);
  });
  PackedImage source{.size = axes.input,
                     .phases = axes.stride,
                     .before = axes.padding,
                     .extent = {},
                     .band_axis = axes.band};
  for (size_t i = 0; i < source.extent.size(); ++i) {
    source.extent[i] = axes.output[i] +
                       (axes.kernel[i] - 1) * axes.dilation[i] / axes.stride[i];
  }
  return {source, axes.output, {std::move(lattice)}};
}

// The gradient of input position x is the sum over k of the output's gradient
// at (x + padding - k * dilation) / stride, if that is an integer. So positions
// x with equal remainders of division by the stride use the same k.
ImageProducts grad_input_products(const ConvolutionSpec& spec) {
  const Axes axes(spec);
  ImageProducts products{.source = {.size = axes.output,
                                    .phases = {1, 1, 1},
                                    .before = {},
                                    .extent = {},
                                    .band_axis = axes.band},
                         .output_size = axes.input,
                         .lattices = {}};
  Point lowest{};
  Point highest{};
  for_each_point(axes.stride, [&](const Point& first) {
    Lattice lattice{
        .first = first, .step = axes.stride, .count = {}, .taps = {}};
    for (size_t i = 0; i < first.size(); ++i) {
      lattice.count[i] = ceil_div(axes.input[i] - first[i], axes.stride[i]);
    }
    for_each_point(axes.kernel, [&](const Point& k) {
      Tap tap{.index = flat(k, axes.kernel), .phase = {}, .shift = {}};
      for (size_t i = 0; i < k.size(); ++i) {
        const int64_t distance =
            first[i] + axes.padding[i] - k[i] * axes.dilation[i];
        if (distance % axes.stride[i] != 0) return;
        tap.shift[i] = distance / axes.stride[i];
      }
      for (size_t i = 0; i < k.size(); ++i) {
        lowest[i] = std::min(lowest[i], tap.shift[i]);
        highest[i] = std::max(highest[i], lattice.count[i] + tap.shift[i]);
      }
      lattice.taps.push_back(tap);
    });
    products.lattices.push_back(std::move(lattice));
  });
  for (Lattice& lattice : products.lattices) {
    for (Tap& tap : lattice.taps) {
      for (size_t i = 0; i < lowest.size(); ++i) tap.shift[i] -= lowest[i];
    }
  }
  for (size_t i = 0; i < lowest.size(); ++i) {
    products.source.before[i] = -lowest[i];
    products.source.extent[i] = highest[i] - lowest[i];
  }
  return products;
}

float pack_image(const PackedImage& image, const RowContents& contents,
                 PackRowFunction pack_row, int num_parts, const float* data,
                 int64_t band, uint16_t* out) {
  const int64_t plane = image.plane();
  const int64_t num_groups = contents.num_groups();
  const bool shifted = contents.group == kTileRows;
  float squares = 0.0F;
  // Position 0 of a row of a phase, or of the part that is next to it.
  const auto row_at = [&](const Point& start, int64_t channel) {
    PositionRow row{
        .data = data,
        .offset = flat(start, image.size) * contents.channels + channel,
        .stride = image.phases[2] * contents.channels,
        .first = 0,
        .last = 0,
        .lanes =
            std::clamp<int64_t>(contents.channels - channel, 0, kTileRows)};
    const bool exists = start[0] >= 0 && start[0] < image.size[0] &&
                        start[1] >= 0 && start[1] < image.size[1];
    if (exists) {
      const Range range =
          inside(start[2], image.size[2], image.phases[2], image.extent[2]);
      row.first = range.first;
      row.last = range.last;
    }
    return row;
  };
  int64_t to = 0;
  for_each_point(image.phases, [&](const Point& phase) {
    for_each_point({image.extent[0], image.extent[1], 1}, [&](const Point& i) {
      Point start;
      Point beside;
      for (size_t axis = 0; axis < start.size(); ++axis) {
        const int64_t from = axis == image.band_axis ? band : 0;
        start[axis] = (from + i[axis]) * image.phases[axis] + phase[axis] -
                      image.before[axis];
        beside[axis] = start[axis] + contents.shift[axis];
      }
      for (int64_t group = 0; group < num_groups; ++group) {
        const int64_t channel = group * contents.group;
        squares +=
            pack_row(row_at(start, channel),
                     shifted ? row_at(beside, channel)
                             : row_at(start, channel + kTileRows),
                     image.extent[2],
                     out + group * num_parts * plane + to * kStepDepth, plane);
      }
      to += image.extent[2];
    });
  });
  for (int64_t i = 0; i < num_groups * num_parts; ++i) {
    std::fill_n(out + i * plane + to * kStepDepth, kTileNumbers, uint16_t{0});
  }
  return squares;
}

}  // namespace popsim::dense
