// Prints, for each argument, whether a habit runs jobs in one thread after many jobs whose sizes differ. An argument is how many
// times as long a job takes in one thread as in all of them.
#include <cstdio>
#include <cstdlib>

#include "../../../../../verify/model/cpu/native/team.h"

int main(int count, char** arguments) {
  for (int i = 1; i < count; i++) {
    outrider::Habit habit;
    const double alone = std::atof(arguments[i]);
    for (int job = 0; job < 4000; job++) {
      const double seconds = job / 4 % 2 ? 1 : 3;  // four small jobs, four large ones
      habit.record(habit.is_alone() ? alone * seconds : seconds);
      if (job > 3500 && habit.is_alone() != (alone < 1.2)) std::printf("job %d of %s is tried\n", job, arguments[i]);
    }
    std::printf("%s %s\n", arguments[i], habit.is_alone() ? "alone" : "together");
  }
}
