#include "dense/convolution.h"

#if defined(POPSIM_HAVE_ONEDNN)
#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "base/numbers.h"
#include "dense/available.h"
#include "dense/convolution_pieces.h"
#include "dense/onednn.h"
#include "dense/onednn_convolution.h"
#include "dense/onednn_piece.h"
#include "dense/tile/convolution.h"
#include "threads/tasks.h"

namespace popsim::dense {
namespace {

using dnnl::memory;
using Dims = memory::dims;

// oneDNN computes the output size from the padding on both ends, and so does
// this package.
bool is_consistent(const ConvolutionSpec& spec) {
  for (size_t i = 0; i < spec.input_size.size(); ++i) {
    const int64_t kernel = spec.dilation[i] * (spec.kernel_size[i] - 1) + 1;
    const int64_t room = spec.input_size[i] + 2 * spec.padding[i] - kernel;
    if (room < 0 || room / spec.stride[i] + 1 != spec.output_size[i]) {
      return false;
    }
  }
  return true;
}

// Returns the descriptors of the shapes, or none if one of the shapes has no
// fast code.
std::vector<Described> describe_all(const ConvolutionPieces& cut, Layout layout,
                                    ConvolutionPass pass) {
  const threads::ScopedBudget alone(1);
  std::vector<Described> result;
  for (const PieceShape& shape : cut.shapes) {
    // Pieces that use the same weight use the same layout for it.
    memory::desc weight;
    for (size_t i = 0; i < result.size(); ++i) {
      if (cut.shapes[i].spec.out_channels == shape.spec.out_channels) {
        weight = result[i].weight;
      }
    }
    const auto described = describe(shape, layout, pass, weight);
    if (!described) return {};
    result.push_back(*described);
  }
  return result;
}

// Each thread runs some of the pieces.
class PieceConvolution final : public Convolution {
 public:
  PieceConvolution(const ConvolutionSpec& spec, ConvolutionPass pass,
                   ConvolutionPieces cut,
                   const std::vector<Described>& described)
      : pass_(pass),
        cut_(std::move(cut)),
        shares_(threads::multiplications(num_multiplications(spec)),
                std::ssize(cut_.pieces)) {
    const ConvolutionSizes sizes = sizes_of(spec);
    input_ = strides_in(spec.input_order, sizes.input);
    output_ = strides_in(spec.output_order, sizes.output);
    weight_ = contiguous_strides(sizes.weight);
    plan_runners(described);
    plan_weight(described);
    shares_offset_ =
        plan_.add(share_bytes_ * static_cast<size_t>(shares_.limit()));
  }

  size_t workspace_bytes() const override { return plan_.bytes(); }

  void run(const ConvolutionTensors& tensors, void* workspace) override {
    auto* start = static_cast<char*>(workspace);
    if (pass_ != ConvolutionPass::kGradWeight) {
      Slice& all = slices_.front();
      reorder(all, tensors.weight, part(all, 0, tensors, start), start);
    }
    shares_.run([&](int64_t share, threads::Range pieces) {
      const threads::ScopedBudget alone(1);
      for (int64_t i = pieces.begin; i < pieces.end; ++i) {
        run_piece(cut_.pieces[static_cast<size_t>(i)], share, tensors, start);
      }
    });
    if (pass_ != ConvolutionPass::kGradWeight) return;
    for (Slice& slice : slices_) add_up(slice, tensors, start);
  }

 private:
  // Some channels of the output with their part of the weight: either the
  // weight in the layout of the pieces, or the terms whose sum is the weight's
  // gradient.
  struct Slice {
    WeightOperand weight;
    int64_t channel;  // the first channel
    // The offset of the first part; empty if the part is in the tensor.
    std::optional<size_t> offset;
    int64_t numbers;         // number of values in a part
    threads::Shares shares;  // of the sections of a part
  };

  // Number of values that are added up at a time.
  static constexpr int64_t kStretch = 1024;
  // Number of values in a weight that several threads reorder.
  static constexpr int64_t kShared = 1 << 20;

  void plan_runners(const std::vector<Described>& described) {
    const threads::ScopedBudget alone(1);
    for (int64_t share = 0; share < shares_.limit(); ++share) {
      for (size_t i = 0; i < described.size(); ++i) {
        runners_.emplace_back(cut_.shapes[i].spec, pass_, described[i], input_,
                              output_);
        share_bytes_ =
            std::max(share_bytes_,
                     WorkspacePlan::space(runners_.back().workspace_bytes()));
      }
    }
  }

  void plan_weight(const std::vector<Described>& described) {
    for (const ConvolutionPiece& piece : cut_.pieces) {
      if (piece.slice != slices_.size()) continue;
      const ConvolutionSpec& spec = cut_.shapes[piece.shape].spec;
      Slice slice{
          .weight = {sizes_of(spec).weight, described[piece.shape].weight},
          .channel = piece.channel,
          .offset = std::nullopt,
          .numbers = 0,
          .shares = {}};
      slice.numbers =
          static_cast<int64_t>(slice.weight.bytes() / sizeof(float));
      slice.shares = {threads::elements(slice.numbers * cut_.num_sums),
                      ceil_div(slice.numbers, kStretch)};
      if (slice.weight.differs() || cut_.num_sums > 1) {
        slice.offset = plan_.add(0);
        for (int64_t i = 0; i < cut_.num_sums; ++i) {
          plan_.add(slice.weight.bytes());
        }
      }
      plan_reorder(slice);
      slices_.push_back(std::move(slice));
    }
  }

  [[nodiscard]] float* in_tensor(const Slice& slice,
                                 const ConvolutionTensors& tensors) const {
    return tensors.weight + slice.channel * weight_.front();
  }

  // The memory that piece number `sum` of the slice reads or writes.
  [[nodiscard]] float* part(const Slice& slice, int64_t sum,
                            const ConvolutionTensors& tensors,
                            char* start) const {
    if (!slice.offset) return in_tensor(slice, tensors);
    return reinterpret_cast<float*>(
        start + *slice.offset +
        static_cast<size_t>(sum) * WorkspacePlan::space(slice.weight.bytes()));
  }

  void run_piece(const ConvolutionPiece& piece, int64_t share,
                 const ConvolutionTensors& tensors, char* start) {
    const Slice& slice = slices_[piece.slice];
    ConvolutionTensors parts{
        .input = tensors.input + piece.image * input_[0] +
                 piece.input_row * input_[2],
        .weight = part(slice, piece.sum, tensors, start),
        .bias = tensors.bias,
        .output = tensors.output + piece.image * output_[0] +
                  piece.output_row * output_[2] + piece.channel * output_[1]};
    const size_t index =
        static_cast<size_t>(share) * cut_.shapes.size() + piece.shape;
    runners_[index].run(parts, start + shares_offset_ +
                                   static_cast<size_t>(share) * share_bytes_);
  }

  // Adds up the parts in their order, independent of the threads that computed
  // them.
  void add_up(Slice& slice, const ConvolutionTensors& tensors, char* start) {
    float* tensor = in_tensor(slice, tensors);
    float* sums =
        slice.weight.differs() ? part(slice, 0, tensors, start) : tensor;
    if (cut_.num_sums > 1) {
      slice.shares.run([&](int64_t /*share*/, threads::Range stretches) {
        for (int64_t i = stretches.begin; i < stretches.end; ++i) {
          const int64_t first = i * kStretch;
          const int64_t count = std::min(kStretch, slice.numbers - first);
          float* to = sums + first;
          for (int64_t sum = 0; sum < cut_.num_sums; ++sum) {
            const float* from = part(slice, sum, tensors, start) + first;
            if (sum == 0 && from != to) std::copy_n(from, count, to);
            for (int64_t j = 0; j < count && sum > 0; ++j) to[j] += from[j];
          }
        }
      });
    }
    reorder(slice, tensor, sums, start);
  }

  // oneDNN would use OpenMP's threads even for a few values, as many as it
  // could use when this was planned. They look for more work for milliseconds,
  // on the cores that the helpers of the pieces need.
  static bool is_small(const Slice& slice) { return slice.numbers < kShared; }

  void plan_reorder(Slice& slice) {
    const auto plan = [&] {
      if (pass_ == ConvolutionPass::kGradWeight) {
        slice.weight.plan_to_plain(plan_);
      } else {
        slice.weight.plan_to_blocked(plan_);
      }
    };
    if (is_small(slice)) {
      threads::run_alone(plan);
    } else {
      plan();
    }
  }

  static void reorder(Slice& slice, float* plain, float* parts, char* start) {
    const auto run = [&] { slice.weight.run(plain, parts, start); };
    if (is_small(slice)) {
      threads::run_alone(run);
    } else {
      threads::run_shared(run);
    }
  }

  ConvolutionPass pass_;
  ConvolutionPieces cut_;
  threads::Shares shares_;
  // Strides of the tensors.
  Dims input_;
  Dims output_;
  Dims weight_;
  std::vector<PieceRunner> runners_;  // the runners of one thread are adjacent
  std::vector<Slice> slices_;
  WorkspacePlan plan_;
  size_t share_bytes_ = 0;
  size_t shares_offset_ = 0;
};

std::unique_ptr<Convolution> create_in_pieces(const ConvolutionSpec& spec,
                                              ConvolutionPass pass) {
  const std::array cuts{cut_convolution(spec, pass),
                        ConvolutionPieces::whole(spec)};
  for (const Layout layout : layouts_for(spec, pass)) {
    for (const ConvolutionPieces& cut : cuts) {
      const std::vector<Described> described = describe_all(cut, layout, pass);
      if (described.empty()) continue;
      return std::make_unique<PieceConvolution>(spec, pass, cut, described);
    }
  }
  return nullptr;
}

}  // namespace
}  // namespace popsim::dense
#endif

namespace popsim::dense {

#if defined(POPSIM_HAVE_ONEDNN)
std::unique_ptr<Convolution> create_convolution(const ConvolutionSpec& spec,
                                                ConvolutionPass pass) {
  if (!available() || num_multiplications(spec) == 0 || !is_consistent(spec)) {
    return nullptr;
  }
  try {
    return with_tile_units(create_in_pieces(spec, pass), spec, pass);
  } catch (const dnnl::error&) {
    return nullptr;
  }
}
#else
std::unique_ptr<Convolution> create_convolution(const ConvolutionSpec&,
                                                ConvolutionPass) {
  return nullptr;
}
#endif

}  // namespace popsim::dense
