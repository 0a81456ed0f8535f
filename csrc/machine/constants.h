// The numbers of the machine model that are not sizes of a device, with where
// they come from. Formulas take them from here.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace popsim::machine {

// Where a number or a formula comes from, from the most to the least certain.
enum class Grade : int8_t {
  kPublished,  // A: printed in documents or library sources
  kFitted,     // B: fitted to published measurements
  kAssumed,    // C: an engineering assumption
  kNone,       // there is no formula: the op counts as taking no time
};

[[nodiscard]] inline Grade worse(Grade a, Grade b) { return a < b ? b : a; }

struct Constant {
  std::string_view name;
  double value;
  std::string_view unit;
  Grade grade;
  std::string_view source;
  // Validation may move the value between these; equal: it may not.
  double least;
  double most;
};

namespace constants {

[[nodiscard]] constexpr Constant fixed(std::string_view name, double value,
                                       std::string_view unit, Grade grade,
                                       std::string_view source) {
  return {name, value, unit, grade, source, value, value};
}

inline constexpr int64_t kWorkers = 6;        // of a tile
inline constexpr double kExchangeBytes = 4;   // of a tile, per cycle
inline constexpr int64_t kIpusOfMachine = 4;  // that share the way to the host

// --- Every op ---------------------------------------------------------------
inline constexpr Constant kSync{
    "sync",
    216,
    "cycles",
    Grade::kFitted,
    "150 to 240 fit PopSparse (arXiv 2303.16999) alike; raised for row V19",
    150,
    240};
inline constexpr Constant kGlue{
    "glue",
    450,
    "cycles",
    Grade::kFitted,
    "400 fits ResNet-50 inference (ByteMLPerf) better; raised for row V19",
    300,
    600};
inline constexpr Constant kBackward{"backward convolution",
                                    1.35,
                                    "factor",
                                    Grade::kFitted,
                                    "ResNet-50 training (ALCF user guide)",
                                    1.0,
                                    1.35};
inline constexpr Constant kVertex =
    fixed("start of a vertex", 11, "cycles", Grade::kPublished,
          "PopLibs, popopsCycleEstimators");

// --- Links ------------------------------------------------------------------
inline constexpr Constant kExternalSync =
    fixed("external sync", 600, "cycles", Grade::kAssumed,
          "a third-party compiler for the IPU");
inline constexpr Constant kHopSeconds =
    fixed("hop of a sync", 15e-9, "s", Grade::kPublished,
          "PopLibs, ExchangeEstimator");
inline constexpr Constant kPairRate =
    fixed("links of a pair", 54.4e9, "B/s", Grade::kPublished,
          "4 links of 16 GB/s, 85 % of it (PopLibs)");
inline constexpr Constant kNeighbourRate =
    fixed("links between pairs", 27.2e9, "B/s", Grade::kAssumed,
          "2 links of 16 GB/s, 85 % of it (PopLibs); the routing is assumed");
inline constexpr Constant kAllReduce{"all-reduce, up to 64 IPUs",
                                     27.2e9,
                                     "B/s",
                                     Grade::kFitted,
                                     "ResNet-50 training on 16 and 64 IPUs",
                                     20e9,
                                     32e9};
inline constexpr Constant kFarAllReduce{
    "all-reduce, more IPUs",          10e9, "B/s", Grade::kFitted,
    "ResNet-50 training on 256 IPUs", 7e9,  14e9};
inline constexpr Constant kOffChipRate =
    fixed("memory beside the IPUs", 38.4e9, "B/s of a machine", Grade::kAssumed,
          "two DDR4-2400 modules of an IPU-M2000");

// --- Host -------------------------------------------------------------------
inline constexpr Constant kHostRate =
    fixed("host, data waiting", 8e9, "B/s", Grade::kPublished,
          "Graphcore's tutorial 6 for Poplar");
inline constexpr Constant kHostRateOfMachine =
    fixed("host, 4 IPUs together", 11e9, "B/s", Grade::kAssumed,
          "network card of 100 Gb/s");
inline constexpr Constant kStagedHostRate =
    fixed("host, data staged first", 2.1e9, "B/s", Grade::kFitted,
          "the same tutorial on hardware");
inline constexpr Constant kStreamCopy =
    fixed("stream copy", 1500, "cycles", Grade::kPublished,
          "Graphcore's tutorial on lightweight profiling");
inline constexpr Constant kHostBegin =
    fixed("blocking call, before", 80'000, "cycles", Grade::kPublished,
          "Graphcore's tutorial on lightweight profiling");
inline constexpr Constant kHostEnd =
    fixed("blocking call, after", 83'000, "cycles", Grade::kPublished,
          "Graphcore's tutorial on lightweight profiling");

// --- Memory -----------------------------------------------------------------
inline constexpr Constant kCodeBytes{"control code",
                                     24 * 1024.0,
                                     "B on a tile",
                                     Grade::kAssumed,
                                     "observed scale of compiled programs",
                                     0,
                                     96 * 1024.0};
inline constexpr Constant kExchangeCodeBytes{
    "code of an op with an exchange",
    400,
    "B on a tile",
    Grade::kAssumed,
    "observed scale of compiled programs",
    100,
    400};
inline constexpr Constant kOpCodeBytes{"code of another op",
                                       150,
                                       "B on a tile",
                                       Grade::kAssumed,
                                       "observed scale of compiled programs",
                                       50,
                                       150};
inline constexpr Constant kRandomStateBytes =
    fixed("random state of a worker", 16, "B", Grade::kAssumed,
          "four words of 32 bits");

// Every constant above, for documentation and tests.
inline constexpr std::array kAll = {kSync,
                                    kGlue,
                                    kBackward,
                                    kVertex,
                                    kExternalSync,
                                    kHopSeconds,
                                    kPairRate,
                                    kNeighbourRate,
                                    kAllReduce,
                                    kFarAllReduce,
                                    kOffChipRate,
                                    kHostRate,
                                    kHostRateOfMachine,
                                    kStagedHostRate,
                                    kStreamCopy,
                                    kHostBegin,
                                    kHostEnd,
                                    kCodeBytes,
                                    kExchangeCodeBytes,
                                    kOpCodeBytes,
                                    kRandomStateBytes};

}  // namespace constants
}  // namespace popsim::machine
