#include <cctype>
#include <sstream>

#include "base/check.h"
#include "schedule/action.h"

namespace popsim::schedule {

std::string to_string(const Action& action) {
  if (action.kind == ActionKind::kUpdate) return "U";
  return join(action.stage, action.kind == ActionKind::kForward ? "F" : "B",
              action.micro_batch);
}

std::string to_string(const ActionList& actions) {
  std::string text;
  for (const Action& action : actions) {
    if (!text.empty()) text += " ";
    text += to_string(action);
  }
  return text;
}

ActionList parse(const std::string& text) {
  ActionList actions;
  std::istringstream words(text);
  std::string word;
  while (words >> word) {
    if (word == "U") {
      actions.push_back({ActionKind::kUpdate, 0, 0});
      continue;
    }
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
    actions.push_back(action);
  }
  return actions;
}

}  // namespace popsim::schedule
