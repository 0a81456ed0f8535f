#include "bindings/feeds.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings/interpreter_lock.h"
#include "feeds/infeed.h"
#include "feeds/outfeed.h"
#include "threads/budget.h"

namespace py = pybind11;

namespace popsim::bindings {
namespace {

using feeds::Infeed;
using feeds::Outfeed;

feeds::Components components_of(const std::vector<std::string>& dtypes,
                                std::vector<Shape> shapes) {
  check_user(dtypes.size() == shapes.size(), "a queue: got ", dtypes.size(),
             " dtypes for ", shapes.size(),
             " shapes, needs one dtype per shape");
  feeds::Components components;
  for (size_t i = 0; i < dtypes.size(); ++i) {
    components.push_back({dtype_from_name(dtypes[i]), std::move(shapes[i])});
  }
  return components;
}

py::dict statistics_of(const Outfeed& queue) {
  const feeds::OutfeedStatistics found = queue.statistics();
  py::dict result;
  result["enqueued"] = found.enqueued;
  result["dequeued"] = found.dequeued;
  result["bytes"] = found.bytes;
  result["peak_bytes"] = found.peak_bytes;
  result["dropped"] = found.dropped;
  result["spilled"] = found.spilled;
  result["waits"] = found.waits;
  result["seconds_waited"] = found.seconds_waited;
  result["ready"] = found.ready;
  return result;
}

feeds::WhenFull when_full(const std::string& name) {
  using feeds::WhenFull;
  if (name == "wait") return WhenFull::kWait;
  if (name == "raise") return WhenFull::kRaise;
  if (name == "drop_oldest") return WhenFull::kDropOldest;
  if (name == "drop_newest") return WhenFull::kDropNewest;
  check_user(name == "spill",
             "a queue: when_full must be 'wait', 'raise', 'drop_oldest', "
             "'drop_newest' or 'spill', got '",
             name, "'");
  return WhenFull::kSpill;
}

py::dict statistics_of(const Infeed& queue) {
  const feeds::InfeedStatistics found = queue.statistics();
  py::dict result;
  result["pushed"] = found.pushed;
  result["taken"] = found.taken;
  result["waits"] = found.waits;
  result["seconds_waited"] = found.seconds_waited;
  result["seconds_full"] = found.seconds_full;
  result["ready"] = found.ready;
  result["depth"] = found.depth;
  return result;
}

using WithoutLock = py::call_guard<Unlocked>;

void bind_outfeed(py::module_& m) {
  py::class_<Outfeed, ops::Outlet, std::shared_ptr<Outfeed>>(m, "Outfeed")
      .def(py::init([](const std::vector<std::string>& dtypes,
                       std::vector<Shape> shapes, bool last, int64_t every,
                       int64_t buffer_depth, int64_t max_bytes,
                       const std::string& full, double patience,
                       std::string spill_folder, std::string name) {
             return std::make_shared<Outfeed>(feeds::OutfeedConfig{
                 components_of(dtypes, std::move(shapes)), last, every,
                 buffer_depth, max_bytes, when_full(full), patience,
                 std::move(spill_folder), std::move(name)});
           }),
           py::arg("dtypes"), py::arg("shapes"), py::arg("last"),
           py::arg("every"), py::arg("buffer_depth"), py::arg("max_bytes"),
           py::arg("when_full"), py::arg("patience"), py::arg("spill_folder"),
           py::arg("name"))
      .def("take", &Outfeed::take, py::arg("most"), WithoutLock())
      .def("take_one", &Outfeed::take_one, WithoutLock())
      .def("wait", &Outfeed::wait, py::arg("seconds"), WithoutLock())
      .def("wake", &Outfeed::wake, WithoutLock())
      .def("close", &Outfeed::close, WithoutLock())
      .def("statistics",
           [](const Outfeed& self) { return statistics_of(self); });
}

void bind_infeed(py::module_& m) {
  py::class_<Infeed, runtime::Inlet, std::shared_ptr<Infeed>>(m, "Infeed")
      .def(py::init([](const std::vector<std::string>& dtypes,
                       std::vector<Shape> shapes, int64_t depth) {
             return std::make_shared<Infeed>(
                 components_of(dtypes, std::move(shapes)), depth);
           }),
           py::arg("dtypes"), py::arg("shapes"), py::arg("depth"))
      .def("push", &Infeed::push, py::arg("tensors"), py::arg("seconds"),
           WithoutLock())
      .def("end", &Infeed::end, py::arg("message"), WithoutLock())
      .def("clear", &Infeed::clear, WithoutLock())
      .def("close", &Infeed::close, WithoutLock())
      .def_property_readonly("closed", &Infeed::closed)
      .def_property_readonly("depth", &Infeed::depth)
      .def("ensure_depth", &Infeed::ensure_depth, py::arg("slots"),
           WithoutLock())
      .def("statistics",
           [](const Infeed& self) { return statistics_of(self); });
}

}  // namespace

void bind_feeds(py::module_& m) {
  m.def("use_one_thread", &threads::use_one_thread);
  bind_outfeed(m);
  bind_infeed(m);
}

}  // namespace popsim::bindings
