#include <algorithm>
#include <array>
#include <atomic>
#include <vector>

#include "base/numbers.h"
#include "dense/tile/convolution.h"
#include "dense/tile/image.h"
#include "dense/tile/parts.h"
#include "dense/tile/units.h"
#include "threads/tasks.h"

namespace popsim::dense {
namespace {

// Size of the packed images that stay in a core's cache.
constexpr int64_t kCacheBytes = 1 << 20;
// The smallest number of images, or parts of images, that threads share.
constexpr int64_t kUnits = 4;
// The largest number of sums that are added up, one for each task; there are
// fewer if the sums are large.
constexpr int64_t kMaxTasks = 8;
constexpr int64_t kMinTasks = 2;
constexpr int64_t kTaskBytes = 1 << 23;

// A column tile of the products: channels of the input at a tap.
struct Columns {
  int64_t group;
  int64_t tap;
};

// A weight's gradient is a product whose depth is the positions of the output:
// the output's gradient times the input at a tap. A row of a tile has two
// positions, which are `half_` rows of a band apart, so the input at another
// tap starts some rows later here too. Each task adds up the results of its
// images.
class TileGradWeight final : public TileConvolution {
 public:
  explicit TileGradWeight(const ConvolutionSpec& spec)
      : spec_(spec),
        input_(forward_products(spec)),
        num_parts_(num_parts_of(spec.significant_bits)),
        pack_row_(pack_row_function(num_parts_)),
        multiply_(block_function(num_parts_)) {
    plan_bands();
    input_contents_ = contents(spec.in_channels, input_.source);
    output_contents_ = contents(spec.out_channels, output_);
    const std::vector<Tap>& taps = input_.lattices.front().taps;
    for (const Tap& tap : taps) {
      for (int64_t i = 0; i < input_contents_.num_groups(); ++i) {
        columns_.push_back({i, tap.index});
        column_offsets_.push_back(i * num_parts_ * input_.source.plane() +
                                  input_.source.offset(tap));
      }
    }
    const int64_t max_tasks =
        std::clamp(kTaskBytes / (4 * num_sums()), kMinTasks, kMaxTasks);
    const int64_t share = ceil_div(spec.batch * num_bands_, max_tasks);
    images_ = num_bands_ > 1
                  ? 1
                  : std::clamp<int64_t>(kCacheBytes / image_bytes(), 1, share);
    for (int64_t image = 0; image < images_; ++image) {
      for (int64_t step = 0; step < num_steps_; ++step) {
        const int64_t offset = step * kTileNumbers;
        input_steps_.push_back(image * input_numbers() + offset);
        output_steps_.push_back(image * output_numbers() + offset);
      }
    }
    num_units_ = ceil_div(spec.batch, images_) * num_bands_;
    num_tasks_ = std::min(max_tasks, num_units_);
    tasks_ = {threads::Work{num_tasks_}, num_tasks_};
    // The number of channels that is worth a thread.
    constexpr int64_t kChannels = 8;
    channels_ = {threads::work_of(spec.out_channels, kChannels),
                 spec.out_channels};
  }

  size_t workspace_bytes() const override {
    return static_cast<size_t>(num_tasks_ * sum_bytes() +
                               tasks_.limit() * share_bytes());
  }

  bool run(const ConvolutionTensors& tensors, void* workspace) override {
    std::atomic<bool> ordinary = true;
    tasks_.run([&](int64_t share, threads::Range tasks) {
      for (int64_t task = tasks.begin; task < tasks.end; ++task) {
        const Area area = this->area(workspace, task, share);
        if (!run_task(tensors, task, area)) ordinary = false;
      }
    });
    if (!ordinary) return false;
    channels_.run([&](int64_t /*share*/, threads::Range channels) {
      for (int64_t i = channels.begin; i < channels.end; ++i) {
        add_up(tensors, workspace, i);
      }
    });
    return true;
  }

  double cycles() const override {
    constexpr double kTurnedRow = 8;
    constexpr double kSum = 2;
    const int64_t tiles =
        num_steps_ * num_columns() * output_contents_.num_groups();
    const int64_t of_input =
        input_.source.num_positions() * input_contents_.num_groups();
    const int64_t of_output =
        output_.num_positions() * output_contents_.num_groups();
    const double per_band =
        step_cycles(num_parts_) * static_cast<double>(tiles) +
        kPackedRowCycles * static_cast<double>(of_input + of_output) +
        kTurnedRow * num_parts_ * static_cast<double>(of_output);
    return per_band * static_cast<double>(spec_.batch * num_bands_) +
           kSum * static_cast<double>(num_tasks_ * num_sums());
  }

 private:
  // The memory of a task: it owns the sums, and shares the rest with the other
  // tasks of its share.
  struct Area {
    float* sums;
    uint16_t* input;   // packed
    uint16_t* output;  // packed and transposed
    uint16_t* rows;    // rows of the output, only packed
  };

  // Chooses bands that fit into the cache; if there are several bands, they
  // have an even number of rows.
  void plan_bands() {
    PackedImage& source = input_.source;
    const size_t axis = source.band_axis;
    const int64_t num_rows = input_.num_rows();
    const int64_t positions = source.num_positions() / source.extent[axis];
    const int64_t row_bytes = 2 * positions * num_parts_ * kStepDepth *
                              ceil_div(spec_.in_channels, kTileRows);
    const int64_t per_image = ceil_div(kUnits, spec_.batch);
    const int64_t rows = std::clamp<int64_t>(
        std::min(kCacheBytes / row_bytes, ceil_div(num_rows, per_image)), 1,
        num_rows);
    half_ = ceil_div(rows, 2);
    num_bands_ = ceil_div(num_rows, 2 * half_);
    half_ = ceil_div(num_rows, 2 * num_bands_);
    input_.cut(half_);
    output_ = {.size = input_.output_size,
               .phases = {1, 1, 1},
               .before = {},
               .extent = source.extent,
               .band_axis = axis};
    output_.extent[axis] = half_;
    Point last = input_.output_size;
    last[axis] = half_;
    for (int64_t& i : last) --i;
    num_steps_ = ceil_div(source.position(last) + 1, kTileRows);
  }

  [[nodiscard]] RowContents contents(int64_t channels,
                                     const PackedImage& image) const {
    RowContents result{.channels = channels, .group = kTileRows, .shift = {}};
    result.shift[image.band_axis] = half_ * image.phases[image.band_axis];
    return result;
  }

  [[nodiscard]] int64_t num_columns() const {
    return static_cast<int64_t>(columns_.size());
  }
  [[nodiscard]] int64_t num_rows() const {
    return ceil_div(spec_.out_channels, kBlock);
  }
  [[nodiscard]] int64_t num_sums() const {
    return num_rows() * ceil_div(num_columns(), 2) * kBlockNumbers;
  }
  [[nodiscard]] int64_t input_numbers() const {
    return input_contents_.num_groups() * num_parts_ * input_.source.plane();
  }
  [[nodiscard]] int64_t output_numbers() const {
    return output_contents_.num_groups() * num_parts_ * output_.plane();
  }
  [[nodiscard]] int64_t image_bytes() const {
    return 2 * (input_numbers() + output_numbers());
  }
  [[nodiscard]] int64_t sum_bytes() const { return 4 * num_sums(); }
  [[nodiscard]] int64_t share_bytes() const {
    return images_ * image_bytes() + 2 * output_numbers();
  }

  [[nodiscard]] float* sums_of(void* workspace, int64_t task) const {
    return static_cast<float*>(workspace) + task * num_sums();
  }
  [[nodiscard]] Area area(void* workspace, int64_t task, int64_t share) const {
    Area area{};
    area.sums = sums_of(workspace, task);
    area.input = reinterpret_cast<uint16_t*>(static_cast<char*>(workspace) +
                                             num_tasks_ * sum_bytes() +
                                             share * share_bytes());
    area.output = area.input + images_ * input_numbers();
    area.rows = area.output + images_ * output_numbers();
    return area;
  }

  // Returns false if some numbers are not ordinary.
  [[nodiscard]] bool run_task(const ConvolutionTensors& tensors, int64_t task,
                              const Area& area) const {
    const TileScope tiles;
    const int64_t first = num_units_ * task / num_tasks_;
    const int64_t last = num_units_ * (task + 1) / num_tasks_;
    for (int64_t unit = first; unit < last; ++unit) {
      const int64_t image = unit / num_bands_ * images_;
      const int64_t count = std::min(images_, spec_.batch - image);
      const int64_t band = unit % num_bands_ * 2 * half_;
      for (int64_t i = 0; i < count; ++i) {
        if (!pack(tensors, image + i, band, area, i)) return false;
      }
      multiply(area, count, unit == first);
    }
    return true;
  }

  // Packs an image as image number i of the unit.
  [[nodiscard]] bool pack(const ConvolutionTensors& tensors, int64_t image,
                          int64_t band, const Area& area, int64_t i) const {
    const float* input =
        tensors.input + image * product(input_.source.size) * spec_.in_channels;
    const float* output =
        tensors.output + image * product(output_.size) * spec_.out_channels;
    const float of_input =
        pack_image(input_.source, input_contents_, pack_row_, num_parts_, input,
                   band, area.input + i * input_numbers());
    const float of_output = pack_image(output_, output_contents_, pack_row_,
                                       num_parts_, output, band, area.rows);
    uint16_t* to = area.output + i * output_numbers();
    const int64_t num_planes = output_contents_.num_groups() * num_parts_;
    for (int64_t plane = 0; plane < num_planes; ++plane) {
      for (int64_t step = 0; step < num_steps_; ++step) {
        const int64_t offset = plane * output_.plane() + step * kTileNumbers;
        transpose_tile(area.rows + offset, to + offset);
      }
    }
    return are_ordinary(of_input, of_output, spec_.batch * num_bands_);
  }

  void multiply(const Area& area, int64_t num_images, bool first) const {
    const int64_t group = num_parts_ * output_.plane();
    const int64_t num_columns = this->num_columns();
    alignas(64) std::array<float, static_cast<size_t>(kBlockNumbers)> more{};
    float* sums = area.sums;
    for (int64_t row = 0; row < output_contents_.num_groups(); row += 2) {
      for (int64_t column = 0; column < num_columns; column += 2) {
        const bool two_columns = column + 1 < num_columns;
        const int64_t offset = column_offsets_[static_cast<size_t>(column)];
        const int64_t second =
            two_columns
                ? column_offsets_[static_cast<size_t>(column + 1)] - offset
                : 0;
        multiply_({.a = {.data = area.output + row * group,
                         .part = output_.plane(),
                         .second = group,
                         .steps = output_steps_.data()},
                   .b = {.data = area.input + offset,
                         .part = input_.source.plane(),
                         .second = second,
                         .steps = input_steps_.data()},
                   .num_steps = num_images * num_steps_,
                   .two_row_tiles = row + 1 < output_contents_.num_groups(),
                   .two_column_tiles = two_columns,
                   .sums = first ? sums : more.data(),
                   .sum_stride = kBlock});
        if (!first) add_block(more.data(), sums);
        sums += kBlockNumbers;
      }
    }
  }

  // Adds up the tasks' sums for one channel of the output.
  void add_up(const ConvolutionTensors& tensors, void* workspace,
              int64_t channel) const {
    const int64_t num_taps = num_columns() / input_contents_.num_groups();
    float* weight = tensors.weight + channel * spec_.in_channels * num_taps;
    const int64_t row =
        channel / kBlock * ceil_div(num_columns(), 2) * kBlockNumbers +
        channel % kBlock * kBlock;
    for (int64_t i = 0; i < num_columns(); ++i) {
      const Columns& columns = columns_[static_cast<size_t>(i)];
      const int64_t from = row + i / 2 * kBlockNumbers + i % 2 * kTileRows;
      const int64_t first = columns.group * kTileRows;
      const int64_t count = std::min(kTileRows, spec_.in_channels - first);
      std::array<float, static_cast<size_t>(kTileRows)> sums{};
      for (int64_t task = 0; task < num_tasks_; ++task) {
        const float* of_task = sums_of(workspace, task) + from;
        for (size_t j = 0; j < sums.size(); ++j) sums[j] += of_task[j];
      }
      for (int64_t j = 0; j < count; ++j) {
        weight[(first + j) * num_taps + columns.tap] =
            sum_scale(DType::kFloat32) * sums[static_cast<size_t>(j)];
      }
    }
  }

  ConvolutionSpec spec_;
  ImageProducts input_;
  PackedImage output_{};
  int num_parts_;
  PackRowFunction pack_row_;
  BlockFunction multiply_;
  int64_t half_ = 0;  // rows of a band
  int64_t num_bands_ = 0;
  int64_t num_steps_ = 0;  // of an image
  RowContents input_contents_{};
  RowContents output_contents_{};
  std::vector<Columns> columns_;
  std::vector<int64_t> column_offsets_;
  int64_t images_ = 1;  // of a unit
  std::vector<int64_t> input_steps_;
  std::vector<int64_t> output_steps_;
  int64_t num_units_ = 0;
  int64_t num_tasks_ = 0;
  threads::Shares tasks_;
  threads::Shares channels_;  // of the output
};

}  // namespace

std::unique_ptr<TileConvolution> create_tile_grad_weight(
    const ConvolutionSpec& spec) {
  return std::make_unique<TileGradWeight>(spec);
}

}  // namespace popsim::dense
