// The ops of a program, their order, and the places of its tensors in memory.
//
// A plan prepares no kernel and allocates none of the program's memory, so a
// program of any size can be planned on any machine.
#pragma once

#include <set>
#include <vector>

#include "graph/graph.h"
#include "memory/arena.h"
#include "memory/lanes.h"
#include "memory/live_range.h"
#include "memory/persistent.h"
#include "ops/run_context.h"
#include "runtime/replicas.h"
#include "schedule/action.h"

namespace popsim::runtime {

struct RunConfig {
  int64_t device_iterations = 1;
  int64_t gradient_accumulation = 1;
  bool training = false;
  schedule::Kind schedule = schedule::Kind::kSequential;
  // Runs end at the first op whose arithmetic fails (number_watch.h).
  bool floating_point_checks = false;
  // Its inputs come from feeds, which may make a run wait or may end.
  bool fed = false;
  // The most threads that may run stages; 0: as many as there are.
  int32_t stage_threads = 0;
  // The positions of the stages, as in schedule::Config.
  std::vector<int32_t> positions = {};
  // The processes that run the program together, and the number of this one.
  int64_t num_processes = 1;
  int64_t process = 0;
  Replicas replicas;
};

class Plan {
 public:
  // Throws InternalError if the graph breaks a rule. If another program lies
  // beside this one, this one uses its constants and variables.
  Plan(graph::Graph graph, RunConfig config, const memory::Beside& beside = {});

  [[nodiscard]] const graph::Graph& graph() const { return graph_; }
  [[nodiscard]] bool training() const { return config_.training; }
  [[nodiscard]] bool floating_point_checks() const {
    return config_.floating_point_checks;
  }
  // Whether a device iteration may have to wait for data after it has begun.
  [[nodiscard]] bool waits_in_iteration() const {
    return config_.fed && config_.gradient_accumulation > 1;
  }
  // Whether an op may end a device iteration because a number is NaN or
  // infinite.
  [[nodiscard]] bool checks_numbers() const { return checks_numbers_; }
  // Whether the elements of a device iteration stay until its update is over:
  // if a check ends the iteration, its elements are read again. Such a check
  // comes after all micro-batches.
  [[nodiscard]] bool keeps_elements() const {
    return config_.fed && config_.training && checks_numbers_;
  }
  // The number of micro-batches whose elements are held at a time.
  [[nodiscard]] int64_t max_held() const;
  // Whether a micro-batch reads weights after it has updated them. If such a
  // micro-batch fails, the weights get their old values back.
  [[nodiscard]] bool updates_in_iteration() const {
    return updates_in_iteration_;
  }
  [[nodiscard]] ops::LoopCounts loop() const {
    return {config_.device_iterations, config_.gradient_accumulation,
            config_.replicas.count};
  }
  // The number of replicas that train together, in all processes.
  [[nodiscard]] int64_t num_copies() const {
    return config_.num_processes * config_.replicas.count;
  }
  // The number of this process's first replica among them.
  [[nodiscard]] int64_t first_copy() const {
    return config_.process * config_.replicas.count;
  }
  // The position of a replica in the loops, for a micro-batch of the iteration.
  // `first_key` is the key of random numbers of the iteration's first
  // micro-batch on the first replica.
  [[nodiscard]] ops::Cursor cursor(int64_t iteration, int64_t micro_batch,
                                   int64_t first_key, int64_t replica) const;
  // Training repeats the schedule once per device iteration. Inference has no
  // update to wait for, so its schedule covers all device iterations.
  [[nodiscard]] const schedule::Schedule& schedule() const { return schedule_; }
  [[nodiscard]] const std::vector<memory::Block>& blocks() const {
    return blocks_;
  }
  // The lane of each stage. There is one lane if stages do not work at the same
  // time, or cannot do so on threads of their own.
  [[nodiscard]] const memory::LaneOfStage& lane_of_stage() const {
    return lane_of_stage_;
  }
  [[nodiscard]] int32_t num_lanes() const { return lane_of_stage_.back() + 1; }
  [[nodiscard]] const Replicas& replicas() const { return config_.replicas; }
  // The number of teams that replicas are divided among. Teams work at the same
  // time, each on all lanes of its replicas.
  [[nodiscard]] int32_t num_teams() const { return num_teams_; }
  [[nodiscard]] const memory::Instances& instances() const {
    return instances_;
  }
  // For each op of the update, the replica that runs it for each replica.
  [[nodiscard]] const std::vector<Groups>& updaters() const {
    return updaters_;
  }
  // The waits of each block for blocks of other lanes.
  [[nodiscard]] const std::vector<std::vector<memory::Wait>>& waits() const {
    return waits_;
  }
  // The blocks that a micro-batch passes through last.
  [[nodiscard]] const std::vector<size_t>& last_blocks() const {
    return last_blocks_;
  }
  [[nodiscard]] const std::vector<memory::LiveRange>& live_ranges() const {
    return live_ranges_;
  }
  [[nodiscard]] const memory::ArenaPlan& arena() const { return arena_; }
  [[nodiscard]] const memory::PersistentPlan& persistent() const {
    return persistent_;
  }
  // The numbers of the queues that it enqueues to. Their elements have a part
  // of each replica.
  [[nodiscard]] std::set<int64_t> queues() const;
  // The input tensors, in the order in which a run takes them.
  [[nodiscard]] const std::vector<graph::TensorId>& inputs() const {
    return inputs_;
  }

 private:
  // The most threads that lanes and teams may use.
  [[nodiscard]] int32_t most_threads() const;
  [[nodiscard]] memory::LaneOfStage divide_stages(int32_t most) const;
  [[nodiscard]] bool may_form_teams() const;

  graph::Graph graph_;
  RunConfig config_;
  bool checks_numbers_;
  bool updates_in_iteration_;
  memory::Instances instances_;
  std::vector<Groups> updaters_;
  int32_t num_teams_ = 1;
  schedule::Schedule schedule_;
  std::vector<memory::Block> blocks_;
  memory::LaneOfStage lane_of_stage_;
  std::vector<memory::LiveRange> live_ranges_;
  std::vector<std::vector<memory::Wait>> waits_;
  std::vector<size_t> last_blocks_;
  memory::ArenaPlan arena_;
  memory::PersistentPlan persistent_;
  std::vector<graph::TensorId> inputs_;
};

}  // namespace popsim::runtime
