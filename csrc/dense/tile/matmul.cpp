#include "dense/tile/matmul.h"

#include <algorithm>
#include <array>
#include <vector>

#include "base/check.h"
#include "base/numbers.h"
#include "dense/tile/block_writer.h"
#include "dense/tile/parts.h"
#include "dense/tile/plain_block.h"
#include "dense/tile/units.h"
#include "threads/tasks.h"

namespace popsim::dense {
namespace {

// The resident operand has at most this size, so it stays in a core's cache.
constexpr int64_t kResidentBytes = 1 << 20;
// With shorter sections of the depth, the sums between them cost more than
// packing the other operand again.
constexpr int64_t kMinPanelSteps = 8;
// A thread works on one matrix of a batch alone if its operands have at most
// this size.
constexpr int64_t kMaxOwnBytes = 1 << 20;
// One more thread pays off for this number of steps: of the units, of
// instructions instead of them, or of packing.
constexpr int64_t kStepsForOne = 512;
constexpr int64_t kDotStepsForOne = 40;
constexpr int64_t kPackedStepsForOne = 64;

// One operand, divided into blocks.
struct Operand {
  int64_t num_blocks = 0;
  PackFunction pack = nullptr;
};

// A section of the depth.
struct Panel {
  int64_t first_step;
  int64_t num_steps;
  bool first;
  bool last;
};

// Whether a chunk of the right operand makes strips of the output, which are
// faster to write than short rows, and all threads have enough of them.
bool has_long_strips(const MatmulSpec& spec, int num_parts) {
  const int64_t num_steps = ceil_div(spec.k, kStepDepth);
  const int64_t block_bytes = num_steps * num_parts * 4 * kTileNumbers;
  return num_steps <= kMinPanelSteps && spec.m >= 8 * kBlock &&
         block_bytes * StripWriter::kMostBlocks <= kResidentBytes;
}

// Each thread keeps a chunk of one operand, the resident one, packed in its
// cache. It packs blocks of the other operand, the streamed one, and multiplies
// each with the whole chunk. If the chunk would be too small otherwise, both
// are divided along the depth.
class TileMatmul final : public Matmul {
 public:
  explicit TileMatmul(const MatmulSpec& spec)
      : spec_(spec),
        num_parts_(num_parts_of(spec.significant_bits)),
        b_resident_(spec.n <= spec.m || has_long_strips(spec, num_parts_)),
        a_(operand(spec.m, TileOrder::kRows)),
        b_(operand(spec.n, TileOrder::kPairs)),
        resident_(b_resident_ ? b_ : a_),
        streamed_(b_resident_ ? a_ : b_),
        num_steps_(ceil_div(spec.k, kStepDepth)),
        num_panels_(ceil_div(num_steps_, max_panel_steps())),
        panel_steps_(ceil_div(num_steps_, num_panels_)),
        chunk_(std::clamp<int64_t>(kResidentBytes / block_bytes(), 1,
                                   resident_.num_blocks)),
        keeps_in_c_(spec.result_type == DType::kFloat32 && spec.beta == 0.0F &&
                    !spec.update),
        own_(!spec.one_thread && spec.batch >= threads::most() &&
             (a_.num_blocks + b_.num_blocks) * block_bytes() <= kMaxOwnBytes),
        items_(threads::Work{own_ ? spec.batch : 1}, spec.batch),
        blocks_(block_work(), streamed_.num_blocks),
        multiply_(block_function(num_parts_)),
        writer_(spec_) {
    for (int64_t step = 0; step < panel_steps_; ++step) {
      steps_.push_back(step * num_parts_ * 2 * kTileNumbers);
    }
  }

  using Matmul::run;

  size_t workspace_bytes() const override {
    return static_cast<size_t>(items_.limit() * item_bytes());
  }

  void run(const MatmulOperands& operands) override {
    auto* workspace = static_cast<char*>(operands.workspace);
    items_.run([&](int64_t share, threads::Range items) {
      for (int64_t i = items.begin; i < items.end; ++i) {
        multiply(operands_of(operands, i), workspace + share * item_bytes());
      }
    });
  }

 private:
  [[nodiscard]] Operand operand(int64_t rows, TileOrder order) const {
    return {ceil_div(rows, kBlock),
            pack_function(spec_.operand_type, num_parts_, order)};
  }

  [[nodiscard]] int64_t step_bytes() const {
    return 2 * num_parts_ * 2 * kTileNumbers;
  }
  [[nodiscard]] int64_t block_bytes() const {
    return panel_steps_ * step_bytes();
  }

  [[nodiscard]] int64_t max_panel_steps() const {
    const int64_t resident_step = resident_.num_blocks * step_bytes();
    return std::max(kResidentBytes / resident_step, kMinPanelSteps);
  }

  // Whether a thread computes a matrix alone, or must wake no other thread.
  [[nodiscard]] bool alone() const { return own_ || spec_.one_thread; }

  [[nodiscard]] threads::Work block_work() const {
    if (alone()) return {};
    return threads::work_of(
        a_.num_blocks * b_.num_blocks * num_steps_,
        has_dot_instructions() ? kDotStepsForOne : kStepsForOne);
  }

  // The workspace contains the chunk, a block for each share, the sums of
  // squares, and the sums of all blocks between panels.
  [[nodiscard]] int64_t chunk_bytes() const { return chunk_ * block_bytes(); }
  // The number of blocks that are written together. Those of a resident left
  // operand are not adjacent along the rows; and sums that are the result are
  // written without reading anything.
  [[nodiscard]] int64_t strip_blocks() const {
    if (!b_resident_ || (num_panels_ == 1 && writer_.plain())) return 1;
    return std::min(chunk_, StripWriter::kMostBlocks);
  }
  [[nodiscard]] int64_t strip_bytes() const {
    return strip_blocks() * kBlockNumbers * static_cast<int64_t>(sizeof(float));
  }
  [[nodiscard]] int64_t packed_bytes() const {
    return chunk_bytes() + blocks_.limit() * (block_bytes() + strip_bytes()) +
           ceil_div(chunk_, kTileRows) * kTileRows *
               static_cast<int64_t>(sizeof(float));
  }
  // The sums of the blocks that a share writes together.
  [[nodiscard]] float* strip(char* workspace, int64_t share) const {
    return reinterpret_cast<float*>(workspace + chunk_bytes() +
                                    blocks_.limit() * block_bytes() +
                                    share * strip_bytes());
  }
  // The sums of squares of the blocks of the chunk.
  [[nodiscard]] float* squares(char* workspace) const {
    return reinterpret_cast<float*>(workspace + chunk_bytes() +
                                    blocks_.limit() *
                                        (block_bytes() + strip_bytes()));
  }
  [[nodiscard]] int64_t item_bytes() const {
    const int64_t blocks = a_.num_blocks * b_.num_blocks;
    const bool keeps_here = num_panels_ > 1 && !keeps_in_c_;
    return packed_bytes() + (keeps_here ? blocks * kBlockNumbers * 4 : 0);
  }

  // The operands of matrix `item` of the batch.
  [[nodiscard]] MatmulOperands operands_of(const MatmulOperands& operands,
                                           int64_t item) const {
    const int64_t size = size_in_bytes(spec_.operand_type);
    const int64_t offset = item * spec_.m * spec_.n;
    MatmulOperands one = operands;
    one.a = static_cast<const char*>(operands.a) + item * spec_.a.batch * size;
    one.b = static_cast<const char*>(operands.b) + item * spec_.b.batch * size;
    one.c = static_cast<char*>(operands.c) +
            offset * size_in_bytes(spec_.result_type);
    if (spec_.mask) one.mask += offset;
    return one;
  }

  // One matrix of the batch.
  struct Call {
    const MatmulOperands& operands;
    PartSource a;
    PartSource b;
    char* workspace;
  };

  void multiply(const MatmulOperands& operands, char* workspace) const {
    const Call call{.operands = operands,
                    .a = {operands.a, spec_.operand_type, spec_.m, spec_.k,
                          spec_.a.row, spec_.a.column},
                    .b = {operands.b, spec_.operand_type, spec_.n, spec_.k,
                          spec_.b.column, spec_.b.row},
                    .workspace = workspace};
    for (int64_t i = 0; i < num_panels_; ++i) {
      const int64_t first = i * panel_steps_;
      const Panel panel{.first_step = first,
                        .num_steps = std::min(panel_steps_, num_steps_ - first),
                        .first = i == 0,
                        .last = i + 1 == num_panels_};
      for (int64_t chunk = 0; chunk < resident_.num_blocks; chunk += chunk_) {
        multiply_chunk(call, panel, chunk);
      }
    }
  }

  void multiply_chunk(const Call& call, const Panel& panel,
                      int64_t first) const {
    const PartSource& resident_source = b_resident_ ? call.b : call.a;
    const PartSource& streamed_source = b_resident_ ? call.a : call.b;
    const int64_t last = std::min(first + chunk_, resident_.num_blocks);
    pack_chunk(resident_source, panel, first, last, call.workspace);
    const float* squares = this->squares(call.workspace);
    blocks_.run([&](int64_t share, threads::Range blocks) {
      const TileScope tiles;
      StripWriter writer(writer_, call.operands, strip(call.workspace, share),
                         strip_blocks());
      auto* block = reinterpret_cast<uint16_t*>(call.workspace + chunk_bytes() +
                                                share * block_bytes());
      for (int64_t i = blocks.begin; i < blocks.end; ++i) {
        const float of_block =
            pack_block(streamed_, streamed_source, panel, i, block);
        for (int64_t j = first; j < last; ++j) {
          const bool ordinary =
              are_ordinary(of_block, squares[j - first], /*num_sums=*/1);
          const auto* resident = reinterpret_cast<const uint16_t*>(
              call.workspace + (j - first) * block_bytes());
          compute(call, panel,
                  b_resident_ ? Block{i, j, block, resident, ordinary}
                              : Block{j, i, resident, block, ordinary},
                  writer);
        }
        writer.write();
      }
    });
  }

  void pack_chunk(const PartSource& source, const Panel& panel, int64_t first,
                  int64_t last, char* workspace) const {
    const threads::Work work =
        alone() ? threads::Work{}
                : threads::work_of((last - first) * panel.num_steps,
                                   kPackedStepsForOne);
    const threads::Shares shares(work, last - first);
    shares.run([&](int64_t /*share*/, threads::Range blocks) {
      for (int64_t i = blocks.begin; i < blocks.end; ++i) {
        auto* out = reinterpret_cast<uint16_t*>(workspace + i * block_bytes());
        squares(workspace)[i] =
            pack_block(resident_, source, panel, first + i, out);
      }
    });
  }

  // Returns the sum of squares, as PackFunction does.
  static float pack_block(const Operand& operand, const PartSource& source,
                          const Panel& panel, int64_t i, uint16_t* out) {
    return operand.pack(source, {.first_row = i * kBlock,
                                 .first_depth = panel.first_step * kStepDepth,
                                 .num_steps = panel.num_steps,
                                 .out = out});
  }

  // A block of the output and its packed operands.
  struct Block {
    int64_t row;
    int64_t column;
    const uint16_t* a;
    const uint16_t* b;
    bool ordinary;
  };

  [[nodiscard]] TileWalk walk(const uint16_t* packed) const {
    return {.data = packed,
            .part = 2 * kTileNumbers,
            .second = kTileNumbers,
            .steps = steps_.data()};
  }

  void compute(const Call& call, const Panel& panel, const Block& block,
               StripWriter& writer) const {
    const int64_t offset = block.row * kBlock * spec_.n + block.column * kBlock;
    SumBlock result{
        .sums = writer.sums(),
        .rows = std::min(kBlock, spec_.m - block.row * kBlock),
        .columns = std::min(kBlock, spec_.n - block.column * kBlock),
        .offset = offset,
        .column = block.column * kBlock,
        .kept = kept_in_workspace(call, block),
        .kept_stride = kBlock,
        .first = panel.first,
        .last = panel.last};
    if (keeps_in_c_) {
      result.kept = call.operands.c_floats() + offset;
      result.kept_stride = spec_.n;
    }
    if (block.ordinary) {
      multiply_({.a = walk(block.a),
                 .b = walk(block.b),
                 .num_steps = panel.num_steps,
                 .two_row_tiles = result.rows > kTileRows,
                 .two_column_tiles = result.columns > kTileRows,
                 .sums = result.sums,
                 .sum_stride = kBlock});
      result.scale = sum_scale(spec_.operand_type);
    } else {
      multiply_plain(call, panel, block, result.sums);
    }
    writer.add(result);
  }

  [[nodiscard]] float* kept_in_workspace(const Call& call,
                                         const Block& block) const {
    return reinterpret_cast<float*>(call.workspace + packed_bytes()) +
           (block.row * b_.num_blocks + block.column) * kBlockNumbers;
  }

  void multiply_plain(const Call& call, const Panel& panel, const Block& block,
                      float* sums) const {
    const int64_t depth = panel.first_step * kStepDepth;
    multiply_plain_block(
        {.a = call.a,
         .b = call.b,
         .row = block.row * kBlock,
         .column = block.column * kBlock,
         .first_depth = depth,
         .last_depth = std::min(depth + panel.num_steps * kStepDepth, spec_.k)},
        sums, kBlock);
  }

  MatmulSpec spec_;
  int num_parts_;
  bool b_resident_;
  Operand a_;
  Operand b_;
  Operand resident_;
  Operand streamed_;
  int64_t num_steps_;
  int64_t num_panels_;
  int64_t panel_steps_;
  int64_t chunk_;           // blocks
  bool keeps_in_c_;         // sums between panels
  bool own_;                // each thread computes whole matrices of the batch
  threads::Shares items_;   // of the batch
  threads::Shares blocks_;  // of the streamed operand
  BlockFunction multiply_;
  BlockWriter writer_;
  std::vector<int64_t> steps_;  // the place of each step of a packed block
};

bool is_plain(const MatrixStrides& strides) {
  return strides.row == 1 || strides.column == 1;
}

// Packing costs time for each number of the operands and saves time for each
// multiplication: it pays off if a number takes part in many multiplications,
// and in products that are worth two rounds of the threads. An update of few
// products takes longer block by block than row by row. The bounds were
// measured on an Emerald Rapids processor. (float16 products gain more: the
// other code reads them only widened.)
bool pays(const MatmulSpec& spec) {
  const int num_parts = num_parts_of(spec.significant_bits);
  const bool wide = num_parts == 3;
  const bool splits = num_parts == 2 && spec.operand_type == DType::kFloat32;
  const int64_t min_uses = wide ? 60 : splits ? 34 : 32;
  const int64_t min_work = wide ? 1 << 25 : 1 << 18;
  const int64_t min_depth = !spec.update || wide ? kStepDepth
                            : splits             ? 256
                                                 : 64;
  const int64_t uses = spec.m * spec.n / (spec.m + spec.n);
  return spec.k >= min_depth && uses >= min_uses &&
         spec.batch * spec.m * spec.n * spec.k >= min_work;
}

}  // namespace

std::unique_ptr<Matmul> create_tile_matmul(const MatmulSpec& spec) {
  if (!is_plain(spec.a) || !is_plain(spec.b) ||
      !multiplies_tiles(num_parts_of(spec.significant_bits)) || !pays(spec)) {
    return nullptr;
  }
  return std::make_unique<TileMatmul>(spec);
}

}  // namespace popsim::dense
