#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "base/numbers.h"
#include "dense/tile/convolution.h"
#include "dense/tile/image.h"
#include "dense/tile/parts.h"
#include "dense/tile/units.h"
#include "dense/tile/weights.h"
#include "threads/tasks.h"

namespace popsim::dense {
namespace {

// Size of the packed weights, or packed images, that stay in a core's cache.
constexpr int64_t kBandBytes = 1 << 20;
// The smallest number of images, or parts of images, that threads share.
constexpr int64_t kUnitsOfBatch = 4;
// Number of steps whose sum is added to the sum of the earlier steps; this
// keeps the error of long sums small.
constexpr int64_t kMaxSteps = 64;

// A lattice, the place of its packed operands, and the place of its results.
struct Part {
  Point count;
  TileWeights weights;
  int64_t first_weight;  // in numbers
  std::vector<int64_t> source_steps;
  // For each position of the first band, its place in the output image, or -1
  // if the packed image goes beyond the end of a row there.
  std::vector<int64_t> results;
  int64_t band_step;  // in the output image, between rows of a band
};

// A unit is some images, or a band of one image: a thread packs it and
// multiplies it with all packed weights.
class ImageConvolution final : public TileConvolution {
 public:
  ImageConvolution(const ConvolutionSpec& spec, ConvolutionPass pass)
      : batch_(spec.batch),
        forward_(pass == ConvolutionPass::kForward),
        bias_(spec.bias && forward_),
        products_(forward_ ? forward_products(spec)
                           : grad_input_products(spec)),
        num_parts_(num_parts_of(spec.significant_bits)),
        pack_row_(pack_row_function(num_parts_)),
        multiply_(block_function(num_parts_)),
        columns_(forward_ ? spec.out_channels : spec.in_channels),
        num_blocks_(ceil_div(columns_, kBlock)),
        num_results_(product(products_.output_size) * columns_) {
    contents_.channels = forward_ ? spec.in_channels : spec.out_channels;
    contents_.group = kStepDepth;
    if (contents_.channels <= kTileRows) {
      const int64_t stride = forward_ ? 1 : spec.stride.back();
      const int64_t dilation = spec.dilation.back();
      contents_.group = kTileRows;
      contents_.shift = {0, 0, dilation / std::gcd(stride, dilation)};
    }
    cut_bands();
    const int64_t num_taps =
        std::accumulate(spec.kernel_size.begin(), spec.kernel_size.end(),
                        int64_t{1}, std::multiplies<>());
    const int64_t of_output = spec.in_channels * num_taps;
    const WeightStrides strides = forward_ ? WeightStrides{of_output, num_taps}
                                           : WeightStrides{num_taps, of_output};
    for (const Lattice& lattice : products_.lattices) {
      add_part(lattice, strides);
    }
    choose_units();
  }

  double cycles() const override {
    constexpr double kResultRow = 8;
    constexpr double kWeight = 5;
    double per_band = kPackedRowCycles *
                      static_cast<double>(products_.source.num_positions() *
                                          contents_.num_groups());
    for (const Part& part : parts_) {
      const auto positions = static_cast<int64_t>(part.results.size());
      const int64_t tiles =
          ceil_div(positions, kTileRows) * ceil_div(columns_, kTileRows);
      per_band += static_cast<double>(tiles) *
                  (step_cycles(num_parts_) *
                       static_cast<double>(part.weights.num_steps()) +
                   kResultRow * kTileRows);
    }
    return per_band * static_cast<double>(batch_ * num_bands_) +
           kWeight * static_cast<double>(num_weights_ / num_parts_);
  }

  size_t workspace_bytes() const override {
    const int64_t areas = std::max(units_.limit(), blocks_.limit());
    return static_cast<size_t>(2 * num_weights_ + areas * share_bytes_);
  }

  bool run(const ConvolutionTensors& tensors, void* workspace) override {
    const Call call{.source = forward_ ? tensors.input : tensors.output,
                    .weight = tensors.weight,
                    .bias = bias_ ? tensors.bias : nullptr,
                    .result = forward_ ? tensors.output : tensors.input,
                    .workspace = static_cast<char*>(workspace)};
    const float of_weights = pack_weights(call);
    std::atomic<bool> ordinary = true;
    units_.run([&](int64_t share, threads::Range units) {
      const TileScope tiles;
      auto* images = reinterpret_cast<uint16_t*>(share_area(call, share));
      for (int64_t i = units.begin; i < units.end; ++i) {
        const float of_images = pack_unit(call, unit_at(i), images);
        if (!are_ordinary(of_images, of_weights, /*num_sums=*/1)) {
          ordinary = false;
          return;
        }
        for (const Part& part : parts_) {
          compute(call, unit_at(i), part, images);
        }
      }
    });
    return ordinary;
  }

 private:
  struct Call {
    const float* source;
    const float* weight;
    const float* bias;  // or null
    float* result;
    char* workspace;
  };

  // Some images, and one band of each.
  struct Unit {
    int64_t first_image;
    int64_t num_images;
    int64_t band;  // its first row
  };

  // A packed image.
  [[nodiscard]] int64_t image_numbers() const {
    return contents_.num_groups() * num_parts_ * products_.source.plane();
  }

  // Chooses bands that fit into the cache, and enough bands for some threads.
  void cut_bands() {
    const PackedImage& source = products_.source;
    const int64_t num_rows = products_.num_rows();
    const int64_t row_bytes =
        2 * image_numbers() / source.extent[source.band_axis];
    const int64_t per_image = ceil_div(kUnitsOfBatch, batch_);
    const int64_t rows = std::clamp<int64_t>(
        std::min(kBandBytes / std::max<int64_t>(row_bytes, 1),
                 ceil_div(num_rows, per_image)),
        1, num_rows);
    num_bands_ = ceil_div(num_rows, rows);
    band_rows_ = ceil_div(num_rows, num_bands_);
    products_.cut(band_rows_);
  }

  void add_part(const Lattice& lattice, const WeightStrides& strides) {
    const PackedImage& source = products_.source;
    const Point& size = products_.output_size;
    std::vector<DepthStep> depth = depth_steps(source, contents_, lattice);
    std::vector<int64_t> steps;
    for (const DepthStep& step : depth) {
      const Tap& tap = lattice.taps[static_cast<size_t>(step.tap)];
      steps.push_back(step.group * num_parts_ * source.plane() +
                      source.offset(tap));
    }
    Point band = lattice.count;
    band[source.band_axis] = std::min(band[source.band_axis], band_rows_);
    std::vector<int64_t> results(static_cast<size_t>(source.reach(band)), -1);
    for_each_point(band, [&](const Point& at) {
      int64_t position = 0;
      for (size_t i = 0; i < at.size(); ++i) {
        position =
            position * size[i] + lattice.first[i] + at[i] * lattice.step[i];
      }
      results[static_cast<size_t>(source.position(at))] = position * columns_;
    });
    int64_t band_step = columns_ * lattice.step[source.band_axis];
    for (size_t i = source.band_axis + 1; i < size.size(); ++i) {
      band_step *= size[i];
    }
    parts_.push_back(
        {.count = lattice.count,
         .weights = TileWeights(lattice, contents_, strides, columns_,
                                num_parts_, std::move(depth)),
         .first_weight = num_weights_,
         .source_steps = std::move(steps),
         .results = std::move(results),
         .band_step = band_step});
    num_weights_ += num_blocks_ * parts_.back().weights.block_size();
  }

  // Chooses one image at a time, unless the weights would not stay in the
  // cache.
  void choose_units() {
    const int64_t image_bytes = 2 * image_numbers();
    int64_t block_bytes = 1;
    for (const Part& part : parts_) {
      block_bytes = std::max(block_bytes, 2 * part.weights.block_size());
    }
    chunk_ = std::clamp<int64_t>(kBandBytes / block_bytes, 1, num_blocks_);
    if (chunk_ < num_blocks_) {
      images_ = std::clamp<int64_t>(kBandBytes / image_bytes, 1,
                                    ceil_div(batch_, kUnitsOfBatch));
    }
    share_bytes_ = images_ * image_bytes;
    for (const Part& part : parts_) {
      share_bytes_ = std::max(share_bytes_, part.weights.row_bytes());
    }
    // The units are used only for large layers.
    constexpr threads::Work kLarge{threads::Tasks::kMax};
    units_ = {kLarge, ceil_div(batch_, images_) * num_bands_};
    blocks_ = {kLarge, std::ssize(parts_) * num_blocks_};
  }

  [[nodiscard]] Unit unit_at(int64_t i) const {
    const int64_t first = i / num_bands_ * images_;
    return {first, std::min(images_, batch_ - first),
            i % num_bands_ * band_rows_};
  }

  [[nodiscard]] char* share_area(const Call& call, int64_t share) const {
    return call.workspace + 2 * num_weights_ + share * share_bytes_;
  }

  [[nodiscard]] uint16_t* packed_weights(const Call& call, const Part& part,
                                         int64_t block) const {
    return reinterpret_cast<uint16_t*>(call.workspace) + part.first_weight +
           block * part.weights.block_size();
  }

  // Returns the largest sum of squares of a block.
  [[nodiscard]] float pack_weights(const Call& call) const {
    Largest largest;
    blocks_.run([&](int64_t share, threads::Range blocks) {
      auto* rows = reinterpret_cast<float*>(share_area(call, share));
      for (int64_t i = blocks.begin; i < blocks.end; ++i) {
        const Part& part = parts_[static_cast<size_t>(i / num_blocks_)];
        const int64_t block = i % num_blocks_;
        largest.add(part.weights.pack(call.weight, block, rows,
                                      packed_weights(call, part, block)));
      }
    });
    return largest.value();
  }

  // Returns the sum of squares of the whole unit.
  float pack_unit(const Call& call, const Unit& unit, uint16_t* images) const {
    const int64_t numbers = product(products_.source.size) * contents_.channels;
    float squares = 0.0F;
    for (int64_t i = 0; i < unit.num_images; ++i) {
      const float* image = call.source + (unit.first_image + i) * numbers;
      squares += pack_image(products_.source, contents_, pack_row_, num_parts_,
                            image, unit.band, images + i * image_numbers());
    }
    return squares;
  }

  void compute(const Call& call, const Unit& unit, const Part& part,
               const uint16_t* images) const {
    const PackedImage& source = products_.source;
    Point count = part.count;
    int64_t& rows = count[source.band_axis];
    rows = std::min(rows - unit.band, band_rows_);
    const int64_t end = source.reach(count);
    for (int64_t block = 0; block < num_blocks_; block += chunk_) {
      const int64_t last = std::min(block + chunk_, num_blocks_);
      for (int64_t i = 0; i < unit.num_images; ++i) {
        float* result = call.result + (unit.first_image + i) * num_results_ +
                        unit.band * part.band_step;
        for (int64_t at = 0; at < end; at += kBlock) {
          const std::span to(part.results.data() + at,
                             static_cast<size_t>(std::min(kBlock, end - at)));
          for (int64_t j = block; j < last; ++j) {
            multiply(call, part, images + i * image_numbers() + at * kStepDepth,
                     j, to, result);
          }
        }
      }
    }
  }

  // Multiplies a block of positions by a block of columns.
  void multiply(const Call& call, const Part& part, const uint16_t* image,
                int64_t block, std::span<const int64_t> to,
                float* result) const {
    alignas(64) std::array<float, static_cast<size_t>(kBlockNumbers)> sums;
    const int64_t first = block * kBlock;
    const int64_t columns = std::min(kBlock, columns_ - first);
    BlockProduct product{
        .a = {.data = image,
              .part = products_.source.plane(),
              .second = kTileNumbers,
              .steps = part.source_steps.data()},
        .b = part.weights.walk(packed_weights(call, part, block)),
        .num_steps = std::min(part.weights.num_steps(), kMaxSteps),
        .two_row_tiles = std::ssize(to) > kTileRows,
        .two_column_tiles = columns > kTileRows,
        .sums = sums.data(),
        .sum_stride = kBlock};
    multiply_(product);
    if (part.weights.num_steps() > kMaxSteps) {
      add_steps(product, part.weights.num_steps());
    }
    const float* bias = call.bias == nullptr ? nullptr : call.bias + first;
    const float* from = sums.data();
    for (const int64_t offset : to) {
      if (offset >= 0) write(from, bias, columns, result + offset + first);
      from += kBlock;
    }
  }

  // Adds the steps from product.num_steps on.
  void add_steps(BlockProduct product, int64_t num_steps) const {
    alignas(64) std::array<float, static_cast<size_t>(kBlockNumbers)> more{};
    float* sums = std::exchange(product.sums, more.data());
    for (int64_t done = product.num_steps; done < num_steps;
         done += product.num_steps) {
      product.a.steps += product.num_steps;
      product.b.steps += product.num_steps;
      product.num_steps = std::min(num_steps - done, kMaxSteps);
      multiply_(product);
      add_block(more.data(), sums);
    }
  }

  void write(const float* sums, const float* bias, int64_t count,
             float* out) const {
    using Vec = at::vec::Vectorized<float>;
    const Vec scale(sum_scale(DType::kFloat32));
    for (int64_t i = 0; i < count; i += Vec::size()) {
      const int64_t lanes = std::min<int64_t>(count - i, Vec::size());
      Vec value = Vec::loadu(sums + i) * scale;
      if (lanes == Vec::size()) {
        if (bias != nullptr) value = value + Vec::loadu(bias + i);
        value.store(out + i);
      } else {
        if (bias != nullptr) value = value + Vec::loadu(bias + i, lanes);
        value.store(out + i, lanes);
      }
    }
  }

  int64_t batch_;
  bool forward_;
  bool bias_;
  ImageProducts products_;
  int num_parts_;
  PackRowFunction pack_row_;
  BlockFunction multiply_;
  int64_t columns_;      // channels of the result
  int64_t num_blocks_;   // of columns
  int64_t num_results_;  // numbers of an image of the result
  RowContents contents_{};
  int64_t band_rows_ = 0;
  int64_t num_bands_ = 0;
  std::vector<Part> parts_;
  int64_t num_weights_ = 0;  // packed numbers
  int64_t images_ = 1;       // of a unit
  int64_t chunk_ = 1;        // blocks of columns that stay in the cache
  int64_t share_bytes_ = 0;
  threads::Shares units_;
  threads::Shares blocks_;  // of the weights of all parts
};

}  // namespace

std::unique_ptr<TileConvolution> create_tile_convolution(
    const ConvolutionSpec& spec, ConvolutionPass pass) {
  return std::make_unique<ImageConvolution>(spec, pass);
}

}  // namespace popsim::dense
