#include <cctype>
#include <sstream>

#include "base/check.h"
#include "schedule/action.h"

namespace popsim::schedule {
namespace {

// Number of actions; a longer schedule is shown with repetitions.
constexpr int64_t kWrittenInFull = 1000;

void append(std::string& text, const std::string& words) {
  if (!text.empty() && !words.empty()) text += " ";
  text += words;
}

std::string words(const ActionList& actions, int64_t distance) {
  std::string text;
  for (const Action& action : actions) {
    append(text, to_string(further(action, distance)));
  }
  return text;
}

Action parse_action(const std::string& word) {
  if (word == "U") return {ActionKind::kUpdate, 0, 0};
  std::istringstream in(word);
  Action action;
  char letter = 0;
  const bool complete =
      (in >> action.stage >> letter >> action.micro_batch) && in.eof();
  check_user(complete && (letter == 'F' || letter == 'B') &&
                 action.stage >= 0 && action.micro_batch >= 0,
             "schedule: '", word,
             "' is not an action; actions look like 2F0, 2B0 or U");
  action.kind = letter == 'F' ? ActionKind::kForward : ActionKind::kBackward;
  return action;
}

int64_t parse_times(const std::string& word) {
  std::istringstream in(word);
  char letter = 0;
  int64_t times = 0;
  const bool complete = (in >> letter >> times) && in.eof();
  check_user(complete && letter == 'x' && times > 0, "schedule: '", word,
             "' has a bracket without a number of repetitions; write (2F0)x3");
  return times;
}

}  // namespace

const char* kind_letter(ActionKind kind) {
  switch (kind) {
    case ActionKind::kForward:
      return "F";
    case ActionKind::kBackward:
      return "B";
    case ActionKind::kUpdate:
      return "U";
  }
  throw InternalError("schedule: not a kind of action");
}

std::string to_string(const Action& action) {
  if (action.kind == ActionKind::kUpdate) return "U";
  return join(action.stage, kind_letter(action.kind), action.micro_batch);
}

TimeTable time_table(const Schedule& schedule) {
  TimeTable table;
  for (const Stretch& stretch : schedule) {
    auto& times = table.emplace_back(stretch.times, 0).second;
    for (const ActionList& actions : times_of(stretch)) {
      std::vector<std::string>& words = times.emplace_back();
      for (const Action& action : actions) words.push_back(to_string(action));
    }
  }
  return table;
}

std::string to_string(const Schedule& schedule) {
  int64_t num_actions = 0;
  for (const Stretch& stretch : schedule) {
    num_actions += stretch.times * static_cast<int64_t>(stretch.actions.size());
  }
  const bool in_full = num_actions <= kWrittenInFull;
  std::string text;
  for (const Stretch& stretch : schedule) {
    if (!in_full && stretch.times > 1) {
      append(text, join("(", words(stretch.actions, 0), ")x", stretch.times));
      continue;
    }
    for (int64_t time = 0; time < stretch.times; ++time) {
      append(text, words(stretch.actions, time));
    }
  }
  return text;
}

Schedule parse(const std::string& text) {
  Schedule schedule;
  bool open = false;
  std::istringstream words(text);
  std::string word;
  while (words >> word) {
    const bool opens = word.front() == '(';
    const size_t close = word.find(')');
    const bool closes = close != std::string::npos;
    check_user(!(open && opens), "schedule: '", word,
               "' opens a second bracket inside the first");
    check_user(open || opens || !closes, "schedule: '", word,
               "' closes a bracket that is not open");
    const bool after_repeat =
        !open && !schedule.empty() && schedule.back().times > 1;
    if (schedule.empty() || opens || after_repeat) schedule.emplace_back();
    const std::string action = word.substr(opens ? 1 : 0, close - opens);
    schedule.back().actions.push_back(parse_action(action));
    if (closes) schedule.back().times = parse_times(word.substr(close + 1));
    open = (open || opens) && !closes;
  }
  check_user(!open, "schedule: a bracket is not closed in '", text, "'");
  return schedule;
}

}  // namespace popsim::schedule
