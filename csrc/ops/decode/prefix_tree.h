// Label sequences that share their beginnings: each sequence is a node, whose
// parent is the sequence without its last label.
#pragma once

#include <cstdint>
#include <vector>

namespace popsim::ops::decode {

class PrefixTree {
 public:
  static constexpr int32_t kNone = -1;
  static constexpr int32_t kRoot = 0;  // the sequence without labels

  // Allocates memory for this number of sequences.
  explicit PrefixTree(int64_t most) {
    nodes_.resize(static_cast<size_t>(most));
  }

  // Removes all sequences except the root.
  void clear() {
    count_ = 1;
    nodes_[kRoot] = Node{};
  }
  // The sequence extended by this label, or kNone.
  [[nodiscard]] int32_t find(int32_t sequence, int32_t label) const {
    int32_t child = at(sequence).first_child;
    while (child != kNone && at(child).label != label) child = at(child).next;
    return child;
  }
  int32_t find_or_add(int32_t sequence, int32_t label) {
    const int32_t found = find(sequence, label);
    if (found != kNone) return found;
    const int32_t added = count_++;
    Node& parent = at(sequence);
    at(added) = {.parent = sequence,
                 .label = label,
                 .next = parent.first_child,
                 .length = parent.length + 1};
    parent.first_child = added;
    return added;
  }

  [[nodiscard]] int32_t parent(int32_t sequence) const {
    return at(sequence).parent;
  }
  // The last label, or kNone.
  [[nodiscard]] int32_t label(int32_t sequence) const {
    return at(sequence).label;
  }
  // The number of labels.
  [[nodiscard]] int32_t length(int32_t sequence) const {
    return at(sequence).length;
  }
  // A number that the tree's user stores with the sequence; kNone at first.
  [[nodiscard]] int32_t place(int32_t sequence) const {
    return at(sequence).place;
  }
  void set_place(int32_t sequence, int32_t place) {
    at(sequence).place = place;
  }

 private:
  struct Node {
    int32_t parent = kNone;
    int32_t label = kNone;
    int32_t first_child = kNone;
    int32_t next = kNone;  // next child of the same parent
    int32_t length = 0;
    int32_t place = kNone;
  };

  [[nodiscard]] Node& at(int32_t i) { return nodes_[static_cast<size_t>(i)]; }
  [[nodiscard]] const Node& at(int32_t i) const {
    return nodes_[static_cast<size_t>(i)];
  }

  std::vector<Node> nodes_;
  int32_t count_ = 0;
};

}  // namespace popsim::ops::decode
